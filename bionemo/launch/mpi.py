# SPDX-License-Identifier: Apache-2.0
"""mpirun of Open MPI: a process for each device, on every machine of a list."""

import shlex
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import MpiConfig
from bionemo.launch.job import Job, Stage
from bionemo.launch.shell import lines
from bionemo.launch.submit import Here

# mpirun gives the processes of other machines what it is told to by name; so no secret is written anywhere
_FORWARD = """\
export MASTER_ADDR="${{MASTER_ADDR:-{first}}}"
forward=()
for name in PATH PYTHONPATH LD_LIBRARY_PATH MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HF_TOKEN ${{!BIONEMO_@}} \\
  ${{!CUDA_@}} ${{!NCCL_@}} ${{!WANDB_@}} {names}; do
  if [ -n "${{!name+set}}" ]; then forward+=(-x "$name"); fi
done"""
_FIRST = "$(awk '$1 !~ /^#/ && NF {{print $1; exit}}' {hostfile})"


class Mpi(Here):
    """Machines that mpirun reaches.

    Args:
        config: `cluster`.
    """

    program = "mpirun"

    def __init__(self, config: MpiConfig) -> None:
        super().__init__(config)
        self.config: MpiConfig = config

    def setup(self, job: Job) -> list[str]:
        """See `Here`: rank 0 is on the first machine of the list, or on this one."""
        hostfile = self.config.hostfile
        first = _FIRST.format(hostfile=shlex.quote(hostfile)) if hostfile else "$(hostname)"
        return [_FORWARD.format(first=first, names=" ".join(self.config.env_vars))]

    def start(self, job: Job, stage: Stage) -> str:
        """See `Here`; processes are free to use all cores, where mpirun would give each one core or socket."""
        processes = str(stage.nodes * stage.tasks)
        words = ["mpirun", "-np", processes, "--map-by", f"ppr:{stage.tasks}:node", "--bind-to", "none"]
        words += ["--hostfile", self.config.hostfile] if self.config.hostfile else []
        mpirun = shlex.join([*words, *self.config.mpirun_args])
        return f'{mpirun} "${{forward[@]}}" \\\n    {lines(job.command(stage))}'

    def submit(self, job: Job) -> int:
        """See `Here`."""
        if self.config.hostfile and not Path(self.config.hostfile).exists():
            raise UserError(f"cluster.hostfile={self.config.hostfile}: there is no such file")
        return super().submit(job)
