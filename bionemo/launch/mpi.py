# SPDX-License-Identifier: Apache-2.0
"""MPI: mpirun of Open MPI, MPICH or Intel MPI starts one process per device on the machines of a host file."""

import shlex
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import MpiConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import lines

# Open MPI forwards variables by name, so that no secret is written to a file; MPICH and Intel MPI forward all of them.
# MPICH and Intel MPI give a job no number from which a port would follow, and Intel MPI binds processes to cores.
_SETUP = """\
export MASTER_ADDR="${{MASTER_ADDR:-{first}}}"
case "$(mpirun --version 2>&1)" in
  *"Open MPI"*)
    forward=()
    for name in PATH PYTHONPATH LD_LIBRARY_PATH MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HF_TOKEN ${{!BIONEMO_@}} \\
      ${{!CUDA_@}} ${{!NCCL_@}} ${{!WANDB_@}} {names}; do
      if [ -n "${{!name+set}}" ]; then forward+=(-x "$name"); fi
    done
    start() {{ mpirun -np "$1" --map-by "ppr:$2:node" --bind-to none{open_mpi} "${{forward[@]}}" "${{@:3}}"; }} ;;
  *HYDRA* | *"Intel(R) MPI"*)
    export MASTER_PORT="${{MASTER_PORT:-$((15000 + $$ % 10000))}}" I_MPI_PIN="${{I_MPI_PIN:-off}}"
    start() {{ mpirun -n "$1" -ppn "$2"{mpich} "${{@:3}}"; }} ;;
  *)
    echo "error: mpirun is not that of Open MPI, MPICH or Intel MPI: put one of them first in PATH" >&2
    exit 1 ;;
esac"""
# the names in a host file of Open MPI (`HOST slots=8`), of MPICH (`HOST:8`), or with one line per process
_HOSTS = """\
hosts=$(awk '$1 !~ /^#/ && NF {{sub(/:[0-9]+$/, "", $1); if (!seen[$1]++) print $1}}' {hostfile} | paste -sd,)
"""


class Mpi(ForegroundCluster):
    """Machines that mpirun can reach."""

    program = "mpirun"

    def __init__(self, config: MpiConfig) -> None:
        super().__init__(config)
        self.config: MpiConfig = config

    def setup(self, job: Job) -> list[str]:
        """Return lines that set MASTER_ADDR and define the function `start PROCESSES PROCESSES_PER_NODE COMMAND`.

        The address is that of the first host of the host file, or of this host. The function does not bind processes
        to cores, so that they can use several.
        """
        hostfile, more = self.config.hostfile, "".join(f" {shlex.quote(each)}" for each in self.config.mpirun_args)
        quoted = shlex.quote(hostfile or "")
        setup = _SETUP.format(
            first="${hosts%%,*}" if hostfile else "$(hostname)",
            names=" ".join(self.config.env_vars),
            open_mpi=(f" --hostfile {quoted}" if hostfile else "") + more,
            mpich=(' -hosts "$hosts"' if hostfile else "") + more,
        )
        return [(_HOSTS.format(hostfile=quoted) if hostfile else "") + setup]

    def start(self, job: Job, step: JobStep) -> str:
        """Return the command that starts all processes."""
        return f"start {step.nodes * step.tasks} {step.tasks} \\\n    {lines(job.command(step))}"

    def submit(self, job: Job) -> int:
        """Check the host file and run the script."""
        if self.config.hostfile and not Path(self.config.hostfile).exists():
            raise UserError(f"cluster.hostfile={self.config.hostfile}: the file does not exist")
        return super().submit(job)
