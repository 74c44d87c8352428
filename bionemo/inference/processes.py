# SPDX-License-Identifier: Apache-2.0
"""Work in parts: each process computes and stores some of them in a directory, then the first process merges all.

The parts do not depend on the processes. Parts that are stored are not computed again, so interrupted work continues
when the same command is run again, with any number of processes.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from bionemo.common.errors import HostError, RankError, UserError, reraise_as
from bionemo.common.files import identity_of
from bionemo.inference.progress import Advance, no_progress, progress_bar
from bionemo.launch.spawn import spawn_local_workers

_POLL_SECONDS = 0.2


class PartedWork(ABC):
    """Work in parts.

    Attributes:
        kind: type of content of the directory, see `create_owned`.
        directory: directory of the parts.
        identity: what determines the parts, as JSON values.
        unit: what is counted, a plural.
        total: number of units.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]
    directory: Path
    identity: dict[str, Any]
    total: int

    @abstractmethod
    def compute(self, rank: int, ranks: int, advance: Advance) -> None:
        """Compute and store the parts of a rank that are not stored; `advance` is called with a number of units."""

    @abstractmethod
    def count_missing(self) -> int:
        """Return the number of parts that are not stored."""


def compute_first_rank(work: PartedWork, name: str, ranks: int, processes: int, timeout: float = math.inf) -> None:
    """Compute the parts of rank 0 after the directory was created, and wait for those of the other ranks.

    Args:
        work: the work.
        name: name of the progress bar.
        ranks: number of processes on all machines.
        processes: number of processes on this machine, of which this one starts the others.
        timeout: seconds to wait for each new part.

    Raises:
        UserError: if a part cannot be computed, another process fails, or no new part appears within the timeout.
    """
    with spawn_local_workers(processes) as check_workers:
        with progress_bar(name, work.total, work.unit) as advance:
            done = 0

            def advance_all(count: int) -> None:
                nonlocal done
                check_workers()
                new = min(count * ranks, work.total - done)  # assumes that the other ranks are as fast
                done += new
                advance(new)

            work.compute(0, ranks, advance_all)
        _wait_for_parts(work, timeout, check_workers)


def compute_other_rank(
    work: PartedWork, rank: int, ranks: int, timeout: float, error_class: type[HostError]
) -> None:  # fmt: skip
    """Compute the parts of another rank, after the first has created the directory.

    Raises:
        HostError: of this class, if the directory is not created within `timeout` seconds.
        RankError: if a part cannot be computed.
    """
    until = time.monotonic() + timeout
    with reraise_as(error_class):
        while identity_of(work.directory, work.kind) != work.identity:
            if time.monotonic() > until:
                raise UserError(
                    f"{work.directory} was not created within {timeout:.0f} s: check that all processes can access it"
                )
            time.sleep(_POLL_SECONDS)
    with reraise_as(RankError):
        work.compute(rank, ranks, no_progress)


def _wait_for_parts(work: PartedWork, timeout: float, check_workers: Callable[[], object]) -> None:
    missing, since = math.inf, time.monotonic()
    while left := work.count_missing():
        check_workers()
        if left < missing:
            missing, since = left, time.monotonic()
        if time.monotonic() - since > timeout:
            raise UserError(
                f"no new part for {timeout:.0f} s (trainer.rank_timeout), {left} are missing: check the errors of the "
                "other processes, and that all processes can access the directory; the same command continues from "
                "these parts"
            )
        time.sleep(_POLL_SECONDS)
