# SPDX-License-Identifier: Apache-2.0
"""Lightning's interface to the launcher environment."""

from lightning.fabric.plugins.environments import ClusterEnvironment

from bionemo.common.launcher_environment import Process


class LauncherEnvironment(ClusterEnvironment):
    """Rank and address of a process that a launcher started; Lightning starts no processes."""

    def __init__(self, process: Process) -> None:
        self.process, self._world_size = process, process.world_size or 1

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher starts the processes: always."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return self.process.address

    @property
    def main_port(self) -> int:
        """Port of rank 0."""
        return self.process.port

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is passed to the trainer explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Set the number of processes; `Process.check` compares it with that of the launcher."""
        self._world_size = size

    def global_rank(self) -> int:
        """Return the global rank."""
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher determines the rank."""

    def local_rank(self) -> int:
        """Return the local rank."""
        return self.process.local_rank

    def node_rank(self) -> int:
        """Return the number of the node."""
        return self.process.node
