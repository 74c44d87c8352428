# SPDX-License-Identifier: Apache-2.0
"""Status of each rank and the diagnosis which rank failed, died or hung.

Ranks wait for each other in collective operations, and torch counts those that each rank has started in each process
group. If no rank makes progress, the rank that caused it has started fewer collectives than others in some group and
more than others in none.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.distributed.distributed_c10d import _world

from bionemo.common.errors import signal_name

RECONNECT_SECONDS = 1.0  # a rank whose connection was lost for longer is dead
_FAILURE_WINDOW = 0.5  # seconds in which several ranks may report the same failure; the lowest rank is named
_MAX_LISTED = 3  # ranks named in a message
_STDLIB, _TORCH = (str(Path(module.__file__ or "").parent) for module in (threading, torch))


@dataclass
class RankStatus:
    """The latest heartbeat of a rank, and what is known about its process. Times are seconds of the server's clock."""

    rank: int
    last_progress: float = 0.0  # time of the last change of pid, collectives, io_megabytes, phase or finished
    last_heartbeat: float | None = None  # time of the last heartbeat; None: never
    disconnected: float | None = None  # time at which the connection was lost or the process exited
    exit_code: int | None = None  # exit code of a process started by rank 0, negative for a signal
    host: str = ""
    pid: int = 0
    # number of collective operations started, by process group
    collectives: dict[str, int] = field(default_factory=dict)
    io_megabytes: int = 0  # data read and written so far; a long save is progress
    phase: str = "before the start"  # phase of the run, such as "in step 17"
    location: str = ""  # source location of the main thread
    error: tuple[str, float] | None = None  # error message of the rank and the time of its arrival
    finished: bool = False  # the rank has completed the run

    def update(self, heartbeat: dict[str, Any], now: float) -> None:
        """Apply a heartbeat, whose keys are names of attributes."""
        keys = ("pid", "collectives", "io_megabytes", "phase", "finished")
        if any(getattr(self, key) != heartbeat[key] for key in keys):
            self.last_progress = now
        error = heartbeat.pop("error")
        if error is not None and self.error is None:
            self.error = error, now
        vars(self).update(heartbeat, last_heartbeat=now, disconnected=None)

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (host {self.host}, process {self.pid})" if self.pid else "")

    def describe_exit(self) -> str:
        """Describe how the process ended and what it did last."""
        how = "ended without an error message"
        if self.exit_code is not None:
            killed = self.exit_code < 0
            how = f"was killed by {signal_name(-self.exit_code)}" if killed else f"exited with {self.exit_code}"
        if self.disconnected is None or self.last_heartbeat is None:
            return f"{how}, last seen {self.phase}"
        return f"{how}, last seen {self.phase}, {self.disconnected - self.last_heartbeat:.1f} s before"

    def describe_silence(self, seconds: float) -> str:
        """Describe missing heartbeats."""
        if self.last_heartbeat is None:
            return f"has not connected for {seconds:.0f} s"
        return f"has not answered for {seconds:.0f} s (process or host stopped), last seen {self.phase}"

    def describe_activity(self) -> str:
        """Describe what the rank is doing."""
        if self.finished:
            return "has finished"
        return f"is {self.phase}" + (f", {self.location}" if self.location else "")


@dataclass(frozen=True)
class Diagnosis:
    """Why the run ends."""

    # the rank reported an error, died without one, or hung so that others wait for it
    kind: Literal["failed", "died", "hung"]
    rank: int  # lowest rank that caused it
    message: str  # error message, one line


def diagnose(ranks: Sequence[RankStatus], now: float, timeout: float, interval: float) -> Diagnosis | None:
    """Determine which rank failed, died or hung; None while all is well or undecided.

    Args:
        ranks: status of all ranks, in order.
        now: time of the server's clock.
        timeout: seconds within which some rank must make progress.
        interval: seconds between heartbeats.
    """
    failed = [(each.error, each.rank) for each in ranks if each.error]
    if failed and now - min(time for (_, time), _ in failed) >= _FAILURE_WINDOW:
        (message, _), rank = failed[0]
        return Diagnosis("failed", rank, message)
    dead = [each for each in ranks if each.disconnected is not None and not each.error and not each.finished]
    if dead and now - min(each.disconnected for each in dead if each.disconnected is not None) >= RECONNECT_SECONDS:
        return Diagnosis("died", dead[0].rank, _list_ranks(dead, RankStatus.describe_exit))
    idle = now - max(each.last_progress for each in ranks)
    if idle <= timeout or all(each.finished for each in ranks):
        return None
    oldest = now - timeout / 2 - interval
    running = [each for each in ranks if not each.finished]
    if silent := [each for each in running if each.last_heartbeat is None or each.last_heartbeat < oldest]:
        return Diagnosis("hung", silent[0].rank, _list_ranks(silent, lambda each: each.describe_silence(idle)))
    count = Counter(each.location for each in ranks)
    by_location = sorted(ranks, key=lambda each: count[each.location])  # many wait in one place, few hang in another
    if behind := _find_ranks_behind(by_location):
        listed = _list_ranks(behind, RankStatus.describe_activity)
        return Diagnosis("hung", behind[0].rank, f"{listed}: others have waited for {idle:.0f} s")
    listed = _list_ranks(by_location, RankStatus.describe_activity)
    return Diagnosis("hung", by_location[0].rank, f"all ranks have waited for each other for {idle:.0f} s: {listed}")


def _list_ranks(ranks: Sequence[RankStatus], describe: Callable[[RankStatus], str]) -> str:
    listed = "; ".join(f"{each} {describe(each)}" for each in ranks[:_MAX_LISTED])
    return listed + (f"; {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else "")


def _find_ranks_behind(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that others wait for and that wait for no other rank."""
    counts: dict[str, list[int]] = {}
    for each in ranks:
        for group, count in each.collectives.items():
            counts.setdefault(group, []).append(count)
    return [
        each
        for each in ranks
        if any(count < max(counts[group]) for group, count in each.collectives.items())
        and all(count == min(counts[group]) for group, count in each.collectives.items())
    ]


def count_collectives() -> dict[str, int]:
    """Return the number of collective operations that this rank has started, by process group.

    Pipeline groups are left out: a middle stage sends and receives more than the others.
    """
    groups: list[Any] = [group for group in list(_world.pg_map) if "PIPELINE" not in group.group_desc]
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}
    except RuntimeError:  # a backend that does not count
        return {}


def count_io_megabytes() -> int:
    """Return the amount of data that this process has read and written."""
    try:
        return sum(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()) >> 20
    except OSError:
        return 0


def main_thread_frame() -> FrameType | None:
    """Return the current frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_thread_location() -> str:
    """Return file, line and function of the main thread, outside of torch and the standard library."""
    frame = main_thread_frame()
    while frame is not None:
        code = frame.f_code
        is_stdlib = code.co_filename.startswith(_STDLIB) and "-packages" not in code.co_filename
        if not (is_stdlib or code.co_filename.startswith(("<", _TORCH))):
            return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
