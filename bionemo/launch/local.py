# SPDX-License-Identifier: Apache-2.0
"""The local machine: the command of the run starts one process per device."""

from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import LocalConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job


class Local(ForegroundCluster):
    """The local machine."""

    template = "local.sh.j2"
    config: LocalConfig

    def render(self, job: Job) -> dict[Path, str]:
        """Return the configuration and one script."""
        if (nodes := max(step.nodes for step in job.steps)) > 1:
            raise UserError(
                f"trainer.num_nodes={nodes}, but cluster=local uses this machine only: choose cluster=bcm, mpi, ray "
                "or bcp, or start the run on every node with torchrun"
            )
        return super().render(job)
