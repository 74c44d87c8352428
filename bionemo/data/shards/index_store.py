# SPDX-License-Identifier: Apache-2.0
"""Find the index of a shard, or build it: once, however many processes ask, and somewhere, whatever can be written."""

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from bionemo.common.errors import UserError
from bionemo.data.shards.index import ContentHash, Fingerprint, Spec, Table, read_index, write_index

_log = logging.getLogger(__name__)
_LOCK_SECONDS = 600  # plus what a slow disk needs for the file
_SLOWEST_BYTES_PER_SECOND = 20 << 20
_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_ABANDONED_SECONDS = 86_400


def load_index(path: Path, spec: Spec, build: Callable[[], Table], index_mapping_dir: str | Path | None) -> Table:
    """Give the index of a data file, building it if none that fits is found.

    An index fits if size, modification time and samples of the data are as they were, and its status change time is
    one that the index names. Where only the latter differs, the data was copied with its index, or replaced by
    something that put the old modification time back: a hash of the whole file decides, once.

    Args:
        path: the data file.
        spec: what the index is to hold.
        build: goes through the file; called once at most while the file stays as it is. May set `Table.content`.
        index_mapping_dir: where to keep indexes; None: beside the data. The user's cache is the second choice, and
            where that cannot be written either the index stays in memory.

    Raises:
        UserError: from `build`, or if the file keeps changing.
    """
    places = index_places(path, spec, index_mapping_dir)
    for _ in range(3):
        fingerprint, ctime = Fingerprint.of(path), path.stat().st_ctime_ns
        wanted = _Wanted(spec, fingerprint, ctime)
        candidates = [table for place in places if (table := read_index(place, spec, fingerprint)) is not None]
        for table in candidates:
            if ctime in table.ctimes_ns:
                return table
        table = _build_once(path, places, wanted, partial(_same_or_built, path, ctime, candidates, build))
        if Fingerprint.of(path) == fingerprint and path.stat().st_ctime_ns == ctime:
            return table
    raise UserError(f"{path} changes while it is read: wait until it is written, then start again")


class _Wanted(NamedTuple):
    """What an index has to be of."""

    spec: Spec
    fingerprint: Fingerprint
    ctime_ns: int

    def read(self, place: Path) -> Table | None:
        """Give the index at a place, if it is of the data as it is now."""
        table = read_index(place, self.spec, self.fingerprint)
        return table if table is not None and self.ctime_ns in table.ctimes_ns else None


def _same_or_built(path: Path, ctime_ns: int, candidates: Sequence[Table], build: Callable[[], Table]) -> Table:
    """Give the index of a file of the same content, or build it; it names the status change time."""
    content = ContentHash(path).digest() if candidates else ""
    for table in candidates:
        if table.content == content:
            return replace(table, ctimes_ns=(*table.ctimes_ns, ctime_ns))
    table = build()
    return replace(table, content=table.content or content or ContentHash(path).digest(), ctimes_ns=(ctime_ns,))


def index_places(path: Path, spec: Spec, index_mapping_dir: str | Path | None) -> list[Path]:
    """Name the files an index may be kept in, best first.

    Indexes of one data file for different columns have different names, so that they do not drive each other out.
    """
    label = hashlib.blake2b(json.dumps(spec, sort_keys=True).encode(), digest_size=4).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "bionemo", "index")
    first = _below(Path(index_mapping_dir), path) if index_mapping_dir else path
    return [place.with_name(f"{path.name}.idx-{label}") for place in (first, _below(cache, path.resolve()))]


def _below(root: Path, path: Path) -> Path:
    """Put a path under a root, less its leading '/' and any '..'."""
    return root.joinpath(*(part for part in path.parts if part not in (path.anchor, "..")))


def _build_once(path: Path, places: list[Path], wanted: _Wanted, build: Callable[[], Table]) -> Table:
    table: Table | None = None
    problem: OSError | None = None
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _sole_builder(place, wanted.fingerprint.size):
                if (found := wanted.read(place)) is not None:
                    return found  # another process built it while this one waited
                table = table or build()
                write_index(place, wanted.spec, wanted.fingerprint, table)
                return wanted.read(place) or table
        except OSError as error:  # read-only, full, gone: the next place may do
            problem = error
    table = table or build()
    if table.file is None:
        _warn_of_memory(path.parent, str(problem))
    return table


@cache
def _warn_of_memory(folder: Path, problem: str) -> None:
    """Say it once for a folder, not for each of its shards."""
    _log.warning("indexes of %s are kept in memory, as no place for them can be written (%s)", folder, problem)


@contextmanager
def _sole_builder(place: Path, size: int) -> Iterator[None]:
    """Hold the lock beside an index. Where locks do not work several may build, which costs time and nothing else.

    Raises:
        OSError: the directory cannot be written.
    """
    lock = FileLock(place.with_name(place.name + ".lock"), timeout=_LOCK_SECONDS + size / _SLOWEST_BYTES_PER_SECOND)
    try:
        lock.acquire()
    except Timeout:
        _log.warning("waited too long for another process to build %s; building it here as well", place)
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise
    try:
        _remove_abandoned(place)
        yield
    finally:
        if lock.is_locked:
            # Whoever opens the lock after this finds a finished index, or fails to build it just as this one did.
            place.with_name(place.name + ".lock").unlink(missing_ok=True)
            lock.release()


def _remove_abandoned(place: Path) -> None:
    """Delete what builders that were killed left behind."""
    for leftover in place.parent.glob(f"{place.name}.*.tmp"):
        with suppress(FileNotFoundError):  # its writer may be alive after all, and done
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                leftover.unlink()
