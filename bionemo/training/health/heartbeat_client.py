# SPDX-License-Identifier: Apache-2.0
"""Who is there: what the ranks say of themselves, and the verdict when one has failed, is gone or is waited for.

Ranks wait for each other in collective operations, and each counts those that it has begun, for every process group
it belongs to (torch does so anyway). When nothing moves any more, the rank to blame is behind the others of some group
and ahead in none: it is the one that waits for nobody.
"""

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

PATIENCE = 1.0  # seconds that a lost connection has to come back
_TOGETHER = 0.5  # seconds in which ranks fail by one error
_NAMED = 3


@dataclass
class Presence:
    """A rank as it was last heard of; times are seconds of one clock.

    Attributes:
        moved: when what it says last changed.
        heard: when it last said anything; None: never.
        lost: when its connection broke, or its process ended.
        status: with which its process ended, negative for a signal; known of those that this process has started.
        begun: number of collective operations begun, by process group.
        megabytes: read and written so far: a long save is no standstill.
        doing: the phase of the run, such as `in step 17`.
        place: of its main thread, in the source.
        failed: the error that it ends with, and when this was heard.
        left: whether it has done its part.
    """

    rank: int
    moved: float = 0.0
    heard: float | None = None
    lost: float | None = None
    status: int | None = None
    host: str = ""
    process: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    megabytes: int = 0
    doing: str = "before the start"
    place: str = ""
    failed: tuple[str, float] | None = None
    left: bool = False

    def update(self, said: dict[str, Any], now: float) -> None:
        """Take in what the rank says of itself, under the names of the attributes."""
        moving = ("process", "begun", "megabytes", "doing", "left")
        if any(getattr(self, key) != said[key] for key in moving):
            self.moved = now
        error = said.pop("failed")
        if error is not None and self.failed is None:
            self.failed = error, now
        vars(self).update(said, heard=now, lost=None)

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (host {self.host}, process {self.process})" if self.process else "")


@dataclass(frozen=True)
class Verdict:
    """Why all ranks have to leave.

    Attributes:
        kind: `failed` with an error of its own, `gone` without one, or `stuck`, together with all that wait for it.
        rank: the first of those to blame.
        line: for the user.
    """

    kind: Literal["failed", "gone", "stuck"]
    rank: int
    line: str


def judge(ranks: Sequence[Presence], now: float, limit: float, interval: float) -> Verdict | None:
    """Say who is to blame, once that is certain; None while all is well.

    Args:
        ranks: all of them, in order.
        now: by the clock of the presences.
        limit: seconds in which some rank has to move.
        interval: seconds between two words of a rank.
    """
    failed = [(rank.failed, rank.rank) for rank in ranks if rank.failed]
    if failed and now - min(at for (_, at), _ in failed) >= _TOGETHER:
        (error, _), number = failed[0]
        return Verdict("failed", number, error)
    lost = [rank for rank in ranks if rank.lost is not None and not rank.failed and not rank.left]
    if lost and now - min(rank.lost or now for rank in lost) >= PATIENCE:
        return Verdict("gone", lost[0].rank, _listed(lost, how_it_ended))
    idle = now - max(rank.moved for rank in ranks)
    if idle <= limit or all(rank.left for rank in ranks):
        return None
    present = [rank for rank in ranks if not rank.left]
    late = limit / 2 + interval
    if silent := [rank for rank in present if rank.heard is None or now - rank.heard > late]:
        return Verdict("stuck", silent[0].rank, _listed(silent, lambda rank: silence(rank, idle)))
    seldom = Counter(rank.place for rank in ranks)
    by_place = sorted(ranks, key=lambda rank: seldom[rank.place])  # many wait in one place, few hang in another
    if behind := _behind(by_place):
        return Verdict("stuck", behind[0].rank, f"{_listed(behind, _where)}: others have waited for {idle:.0f} s")
    line = f"all ranks wait for each other, for {idle:.0f} s now: {_listed(by_place, _where)}"
    return Verdict("stuck", by_place[0].rank, line)


def how_it_ended(rank: Presence) -> str:
    """Say how a process has ended, as far as its status is known."""
    how = "ended without a word"
    if rank.status is not None:
        how = f"was ended by {signal.Signals(-rank.status).name}" if rank.status < 0 else f"left with {rank.status}"
    before = f", {rank.lost - rank.heard:.1f} s before" if rank.lost is not None and rank.heard is not None else ""
    return f"{how}, last seen {rank.doing}{before}"


def silence(rank: Presence, seconds: float) -> str:
    """Say that a rank says nothing any more, or never did."""
    if rank.heard is None:
        return f"has not come for {seconds:.0f} s"
    return f"has not answered for {seconds:.0f} s (stopped, or its machine is), last seen {rank.doing}"


def _where(rank: Presence) -> str:
    return "has left" if rank.left else f"is {rank.doing}" + (f", {rank.place}" if rank.place else "")


def _listed(ranks: Sequence[Presence], what: Callable[[Presence], str]) -> str:
    named = "; ".join(f"{rank} {what(rank)}" for rank in ranks[:_NAMED])
    return named + (f"; {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


def _behind(ranks: Sequence[Presence]) -> list[Presence]:
    """Those that others wait for and that wait for nobody."""
    counts: dict[str, list[int]] = {}
    for rank in ranks:
        for group, count in rank.begun.items():
            counts.setdefault(group, []).append(count)
    least, most = ({group: of(found) for group, found in counts.items()} for of in (min, max))
    return [
        rank
        for rank in ranks
        if any(count < most[group] for group, count in rank.begun.items())
        and all(count == least[group] for group, count in rank.begun.items())
    ]
