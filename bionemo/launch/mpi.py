# SPDX-License-Identifier: Apache-2.0
"""MPI: mpirun of Open MPI, MPICH or Intel MPI starts one process per device on the machines of a host file."""

from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import MpiConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job


class Mpi(ForegroundCluster):
    """Machines that mpirun can reach."""

    template = "mpi.sh.j2"
    program = "mpirun"
    config: MpiConfig

    def submit(self, job: Job) -> int:
        """Check the host file and run the script."""
        if self.config.hostfile and not Path(self.config.hostfile).exists():
            raise UserError(f"cluster.hostfile={self.config.hostfile}: the file does not exist")
        return super().submit(job)
