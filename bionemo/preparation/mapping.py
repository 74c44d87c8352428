# SPDX-License-Identifier: Apache-2.0
"""The table of UniRef50 clusters and their UniRef90 members, read in parallel and kept as digests and counts.

One line a cluster, below a header: its id, a tab, its members with commas between; further columns do not count.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import Strictness
from bionemo.data.shards.blocks import blocks
from bionemo.preparation.chunks import next_place
from bionemo.preparation.name_index import Places, digest, repeated
from bionemo.preparation.records import column

_STRETCH = 32 << 20
_NEWLINE, _TAB, _COMMA = b"\n\t,"


@dataclass(frozen=True)
class _Lines:
    """Some lines of the table: clusters [n], members of all of them [m], and members of each, int64 [n]."""

    clusters: pa.Array
    members: pa.Array
    counts: NDArray[np.int64]


@dataclass
class Mapping:
    """The clusters and members, each with whether it stays.

    Attributes:
        path: of the table.
        shown: what the user calls it.
        counts: int64 [clusters], members of each as the table has them.
        has_cluster: bool [clusters].
        has_member: bool [members], in the order of the table.
        scratch: holds their digests.
    """

    path: Path
    shown: str
    counts: NDArray[np.int64]
    has_cluster: NDArray[np.bool_]
    has_member: NDArray[np.bool_]
    scratch: Path

    @classmethod
    def read(cls, path: Path, shown: str, scratch: Path, pool: Executor, on_shared: Strictness) -> "Mapping":
        """Read the table.

        Raises:
            UserError: a line without members, or a cluster or member that stands there twice where that is an error.
        """
        scratch.mkdir()
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            edges = [next_place(file.fileno(), b"\n", 1, size)]
            while edges[-1] < size:
                edges.append(next_place(file.fileno(), b"\n", edges[-1] + _STRETCH, size))
        if len(edges) < 2:
            raise UserError(f"{shown} holds no cluster below its header: download it again")
        pieces = range(len(edges) - 1)
        work = partial(_digest, path, shown, scratch)
        counts = np.concatenate(list(pool.map(work, edges[:-1], edges[1:], pieces)))
        if not len(counts):
            raise UserError(f"{shown} holds no cluster below its header: download it again")
        clusters, members = (
            [scratch / f"{number:06}.{kind}" for number in pieces] for kind in ("clusters", "members")
        )
        table = cls(path, shown, counts, np.ones(len(counts), bool), np.ones(int(counts.sum()), bool), scratch)
        for kind, files, kept in (("cluster", clusters, table.has_cluster), ("member", members, table.has_member)):
            again, before = repeated(files, len(kept))
            if len(again) and on_shared == "error":
                first, second = (table.tell(kind, int(number)) for number in (before[0], again[0]))
                raise UserError(
                    f"{second}, which stands at {first.partition(': ')[0]} too ({len(again):,} such {kind}s): correct "
                    "the table, or set on_shared=skip (the first stays)"
                )
            kept[again] = False
            Places.build(scratch / kind, files, len(kept))
        table.settle()
        return table

    def settle(self) -> NDArray[np.int64]:
        """Let clusters go that have no member left, and members whose cluster is gone.

        Returns:
            int64 [clusters], members that are left of each.
        """
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        self.has_member &= self.has_cluster[owner]
        left = np.bincount(owner, weights=self.has_member, minlength=len(self.counts)).astype(np.int64)
        self.has_cluster &= left > 0
        return left

    def tell(self, kind: str, number: int) -> str:
        """Name the file, line, cluster and, where asked for, member of a number: slow, for messages only."""
        cluster = number
        if kind == "member":
            cluster = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        first = members = 0
        for lines in _lines(self.path, self.shown, None, None):
            if cluster < first + len(lines.clusters):
                name = lines.clusters[cluster - first].as_py().decode(errors="replace")
                what = f"cluster {name}"
                if kind == "member":
                    what += f" has the member {lines.members[number - members].as_py().decode(errors='replace')}"
                line, _ = next(islice(_filled(self.path), cluster, None))
                return f"{self.shown}:{line}: {what}"
            first, members = first + len(lines.clusters), members + len(lines.members)
        raise AssertionError(number)


def _digest(path: Path, shown: str, scratch: Path, start: int, stop: int, number: int) -> NDArray[np.int64]:
    """Write the digests of a stretch's clusters and members; members of each cluster, int64 [n]."""
    counts = [np.zeros(0, np.int64)]
    with (scratch / f"{number:06}.clusters").open("wb") as one, (scratch / f"{number:06}.members").open("wb") as other:
        for lines in _lines(path, shown, start, stop):
            one.write(digest(lines.clusters).data)
            other.write(digest(lines.members).data)
            counts.append(lines.counts)
    return np.concatenate(counts)


def _whole_lines(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _lines(path: Path, shown: str, start: int | None, stop: int | None) -> Iterator[_Lines]:
    """Read some lines of the table; all of them, less the header, if no bounds are given."""
    header = start is None
    for block in blocks(path, _whole_lines, start=start, stop=stop):
        data = block.data[: block.end]
        if header:
            data, header = data[data.index(b"\n") + 1 :], False
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        while b"\n\n" in data or data.startswith(b"\n"):
            data = data.replace(b"\n\n", b"\n").removeprefix(b"\n")
        if not data:
            continue
        text = np.frombuffer(data, np.uint8)
        edges = np.flatnonzero((text == _NEWLINE) | (text == _TAB) | (text == _COMMA))
        ends, tabs = edges[text[edges] == _NEWLINE], edges[text[edges] == _TAB]
        starts = np.append(0, ends[:-1] + 1)
        at = np.searchsorted(tabs, starts)
        first, second = (np.append(tabs, [len(text)] * 2)[at + step] for step in (0, 1))
        if (first >= ends).any():
            line, found = next((number, text) for number, text in _filled(path) if b"\t" not in text)
            wrong = found.strip().decode(errors="replace")[:60]
            raise UserError(
                f"{shown}:{line}: no tab in {wrong!r}: a line is a cluster, a tab, its members with commas between"
            )
        owner = np.searchsorted(ends, edges)
        inside = (edges > first[owner]) & (edges <= np.minimum(second, ends)[owner])
        inside &= edges > np.append(-1, edges[:-1]) + 1  # a comma too many ends no member
        begin = np.append(-1, edges[:-1])[inside] + 1
        counts = np.bincount(owner[inside], minlength=len(ends))
        yield _Lines(column(text, starts, first), column(text, begin, edges[inside]), counts)


def _filled(path: Path) -> Iterator[tuple[int, bytes]]:
    """Give the lines below the header that are not blank, with their numbers from 1: slow, for messages only."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if number > 1 and line.strip(b"\r\n"))


def ranks(path: Path, kept: NDArray[np.bool_]) -> Path:
    """Write the place of each kept one among those kept, -1 for the others: int64."""
    place = np.where(kept, np.cumsum(kept) - 1, -1)
    path.write_bytes(place.data)
    return path
