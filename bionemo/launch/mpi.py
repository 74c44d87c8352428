# SPDX-License-Identifier: Apache-2.0
"""Open MPI: mpirun starts one process per device on the machines of a host file."""

import shlex
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import MpiConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import lines

# mpirun forwards variables by name, so that no secret is written to a file
_FORWARD = """\
export MASTER_ADDR="${{MASTER_ADDR:-{first}}}"
forward=()
for name in PATH PYTHONPATH LD_LIBRARY_PATH MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HF_TOKEN ${{!BIONEMO_@}} \\
  ${{!CUDA_@}} ${{!NCCL_@}} ${{!WANDB_@}} {names}; do
  if [ -n "${{!name+set}}" ]; then forward+=(-x "$name"); fi
done"""
_FIRST = "$(awk '$1 !~ /^#/ && NF {{print $1; exit}}' {hostfile})"


class Mpi(ForegroundCluster):
    """Machines that mpirun can reach."""

    program = "mpirun"

    def __init__(self, config: MpiConfig) -> None:
        super().__init__(config)
        self.config: MpiConfig = config

    def setup(self, job: Job) -> list[str]:
        """Return lines that set MASTER_ADDR and the options of mpirun that forward variables.

        The address is that of the first host of the host file, or of this host.
        """
        hostfile = self.config.hostfile
        first = _FIRST.format(hostfile=shlex.quote(hostfile)) if hostfile else "$(hostname)"
        return [_FORWARD.format(first=first, names=" ".join(self.config.env_vars))]

    def start(self, job: Job, step: JobStep) -> str:
        """Return the mpirun command. Processes are not bound to cores, so that they can use several."""
        processes = str(step.nodes * step.tasks)
        mpirun = ["mpirun", "-np", processes, "--map-by", f"ppr:{step.tasks}:node", "--bind-to", "none"]
        mpirun += ["--hostfile", self.config.hostfile] if self.config.hostfile else []
        start = shlex.join([*mpirun, *self.config.mpirun_args])
        return f'{start} "${{forward[@]}}" \\\n    {lines(job.command(step))}'

    def submit(self, job: Job) -> int:
        """Check the host file and run the script."""
        if self.config.hostfile and not Path(self.config.hostfile).exists():
            raise UserError(f"cluster.hostfile={self.config.hostfile}: the file does not exist")
        return super().submit(job)
