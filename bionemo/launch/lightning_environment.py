# SPDX-License-Identifier: Apache-2.0
"""What this process is, in the words of Lightning."""

from lightning.fabric.plugins.environments import ClusterEnvironment

from bionemo.common.launcher_environment import Process


class Launched(ClusterEnvironment):
    """A process that a launcher has started, whichever it was: Lightning starts no others, and guesses nothing."""

    def __init__(self, process: Process) -> None:
        self.process, self._world_size = process, process.world_size or 1

    @property
    def creates_processes_externally(self) -> bool:
        """They are there."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return self.process.address

    @property
    def main_port(self) -> int:
        """Where rank 0 listens."""
        return self.process.port

    @staticmethod
    def detect() -> bool:
        """Never by Lightning: it is given to the trainer."""
        return False

    def world_size(self) -> int:
        """Number of all processes."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """What the trainer was told, of which `Process.check` sees that it is what the launcher has started."""
        self._world_size = size

    def global_rank(self) -> int:
        """Of this process among all."""
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing to set: the launcher has decided."""

    def local_rank(self) -> int:
        """Of this process on its node."""
        return self.process.local_rank

    def node_rank(self) -> int:
        """Number of the node."""
        return self.process.node
