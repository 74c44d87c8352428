# SPDX-License-Identifier: Apache-2.0
"""This machine: the run's own command, which starts a process for each device."""

from bionemo.common.errors import UserError
from bionemo.config.schema import LocalConfig
from bionemo.launch.job import Job, Stage
from bionemo.launch.shell import lines
from bionemo.launch.submit import Here


class Local(Here):
    """This machine.

    Args:
        config: `cluster`.
    """

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)

    def start(self, job: Job, stage: Stage) -> str:
        """See `Here`."""
        if stage.nodes > 1:
            raise UserError(
                f"trainer.num_nodes={stage.nodes}, but cluster=local is this machine alone: choose cluster=bcm, mpi, "
                "ray or bcp, or start the run on each of them by torchrun"
            )
        return lines(job.command(stage))
