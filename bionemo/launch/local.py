# SPDX-License-Identifier: Apache-2.0
"""The local machine: the command of the run starts one process per device."""

from bionemo.common.errors import UserError
from bionemo.config.schema import LocalConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import lines


class Local(ForegroundCluster):
    """The local machine."""

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)

    def start(self, job: Job, step: JobStep) -> str:
        """Return the command of the run."""
        if step.nodes > 1:
            raise UserError(
                f"trainer.num_nodes={step.nodes}, but cluster=local uses this machine only: choose cluster=bcm, "
                "mpi, ray or bcp, or start the run on every node with torchrun"
            )
        return lines(job.command(step))
