# SPDX-License-Identifier: Apache-2.0
"""Read the table of UniRef50 clusters and their UniRef90 members in parallel; keep it as hashes and counts.

The table has a header and one line per cluster: cluster name, tab, comma-separated members; more columns are ignored.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.config.schema.preparation import Strictness
from bionemo.preparation.blocks import read_blocks
from bionemo.preparation.chunks import find_bounds
from bionemo.preparation.name_index import NameIndex, find_duplicates, hash_names
from bionemo.preparation.records import gather_slices

_NEWLINE, _TAB, _COMMA = b"\n\t,"
EntryType = Literal["cluster", "member"]


@dataclass(frozen=True)
class _Lines:
    """Consecutive lines: clusters [n], members of all clusters [m], and number of members per cluster, int64 [n]."""

    clusters: pa.Array
    members: pa.Array
    counts: NDArray[np.int64]


@dataclass
class ClusterMapping:
    """Clusters and members, and whether each is kept. The table has m members in total."""

    path: Path  # the table, uncompressed
    display_path: str  # path of the table, for messages
    counts: NDArray[np.int64]  # [clusters], number of members per cluster in the table
    # bool [clusters] for "cluster", bool [m] in the order of the table for "member"
    keep: dict[EntryType, NDArray[np.bool_]]
    scratch: Path  # directory of the name indexes

    @classmethod
    def read(
        cls, path: Path, display_path: str, scratch: Path, workers: Executor, on_shared: Strictness
    ) -> "ClusterMapping":
        """Read the table.

        Raises:
            UserError: if a line has no members, or a cluster or member occurs twice and `on_shared` is `error`.
        """
        scratch.mkdir()
        bounds = find_bounds(path, b"\n", None)
        chunks = range(len(bounds) - 1)
        task = partial(_write_hashes, path, display_path, scratch)
        results = workers.map(task, bounds[:-1], bounds[1:], chunks)
        counts = np.concatenate([np.zeros(0, np.int64), *results])
        if not len(counts):
            raise UserError(f"{display_path} contains no cluster below its header: download it again")
        keep: dict[EntryType, NDArray[np.bool_]] = {
            "cluster": np.ones(len(counts), bool),
            "member": np.ones(int(counts.sum()), bool),
        }
        mapping = cls(path, display_path, counts, keep, scratch)
        for entry_type, kept in keep.items():
            hash_files = [scratch / f"{index:06}.{entry_type}" for index in chunks]
            repeated, first = find_duplicates(hash_files, len(kept))
            if len(repeated) and on_shared == "error":
                earlier, later = (mapping.describe(entry_type, int(number)) for number in (first[0], repeated[0]))
                raise UserError(
                    f"{later}, which is also at {earlier.partition(': ')[0]} ({len(repeated):,} such "
                    f"{entry_type}s): correct the table, or set on_shared=skip (keeps the first)"
                )
            kept[repeated] = False
            NameIndex.build(mapping.index_directory(entry_type), hash_files, len(kept))
        mapping.drop_orphans()
        return mapping

    def index_directory(self, entry_type: EntryType) -> Path:
        """Return the directory of the name index of clusters or members."""
        return self.scratch / f"{entry_type}s"

    def drop_orphans(self) -> NDArray[np.int64]:
        """Drop members of dropped clusters, and clusters without members; return members per cluster, [clusters]."""
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        self.keep["member"] &= self.keep["cluster"][owner]
        counts = np.bincount(owner, weights=self.keep["member"], minlength=len(self.counts)).astype(np.int64)
        self.keep["cluster"] &= counts > 0
        return counts

    def describe(self, entry_type: EntryType, number: int) -> str:
        """Return file, line and name of a cluster or member, for messages; the table is read again."""
        cluster = number
        if entry_type == "member":
            cluster = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        first = num_members = 0
        for lines in _read_lines(self.path, self.display_path, None, None):
            if cluster < first + len(lines.clusters):
                text = f"cluster {lines.clusters[cluster - first].as_py().decode(errors='replace')}"
                if entry_type == "member":
                    text += f" has the member {lines.members[number - num_members].as_py().decode(errors='replace')}"
                line, _ = next(islice(_nonblank_lines(self.path), cluster, None))
                return f"{self.display_path}:{line}: {text}"
            first, num_members = first + len(lines.clusters), num_members + len(lines.members)
        raise AssertionError(number)


def _write_hashes(
    path: Path, display_path: str, scratch: Path, start: int, stop: int, index: int
) -> NDArray[np.int64]:
    """Write the hashes of a chunk's clusters and members; return the number of members per cluster, int64 [n]."""
    counts = [np.zeros(0, np.int64)]
    new_files = [replacing(scratch / f"{index:06}.{kind}", durable=False) for kind in ("cluster", "member")]
    with (
        new_files[0] as new_clusters, new_files[1] as new_members,
        new_clusters.open("wb") as clusters, new_members.open("wb") as members,
    ):  # fmt: skip
        for lines in _read_lines(path, display_path, start, stop):
            clusters.write(hash_names(lines.clusters).data)
            members.write(hash_names(lines.members).data)
            counts.append(lines.counts)
    return np.concatenate(counts)


def _read_lines(path: Path, display_path: str, start: int | None, stop: int | None) -> Iterator[_Lines]:
    """Read consecutive lines of the table; without bounds, all lines below the header."""
    skip_header = start is None
    for block in read_blocks(path, lambda data: data.rfind(b"\n") + 1, start=start, stop=stop):
        data = block.data[: block.end]
        if skip_header:
            data, skip_header = data[data.index(b"\n") + 1 :], False
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        while b"\n\n" in data or data.startswith(b"\n"):
            data = data.replace(b"\n\n", b"\n").removeprefix(b"\n")
        if not data:
            continue
        text = np.frombuffer(data, np.uint8)
        separators = np.flatnonzero((text == _NEWLINE) | (text == _TAB) | (text == _COMMA))
        ends, tabs = separators[text[separators] == _NEWLINE], separators[text[separators] == _TAB]
        starts = np.append(0, ends[:-1] + 1)
        tab = np.searchsorted(tabs, starts)
        first_tab, second_tab = (np.append(tabs, [len(text)] * 2)[tab + offset] for offset in (0, 1))
        if (first_tab >= ends).any():
            line, found = next((number, text) for number, text in _nonblank_lines(path) if b"\t" not in text)
            wrong = found.strip().decode(errors="replace")[:60]
            raise UserError(
                f"{display_path}:{line}: no tab in {wrong!r}: expected cluster name, tab, comma-separated members"
            )
        line_index = np.searchsorted(ends, separators)
        previous = np.append(-1, separators[:-1])
        ends_member = (separators > first_tab[line_index]) & (separators <= np.minimum(second_tab, ends)[line_index])
        ends_member &= separators > previous + 1  # ignore empty members between two commas
        counts = np.bincount(line_index[ends_member], minlength=len(ends))
        members = gather_slices(text, previous[ends_member] + 1, separators[ends_member])
        yield _Lines(gather_slices(text, starts, first_tab), members, counts)


def _nonblank_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines below the header with their line numbers from 1, for messages."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if number > 1 and line.strip(b"\r\n"))
