# SPDX-License-Identifier: Apache-2.0
"""Find the index of a data file, or build it in one process and store it in the first writable directory."""

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

from filelock import FileLock, Timeout

from bionemo.common.errors import UserError
from bionemo.data.shards.index import ContentHash, FileState, IndexSpec, RecordIndex, read_index, write_index

_log = logging.getLogger(__name__)
_LOCK_SECONDS = 600  # plus the time to read the file from a slow disk
_SLOW_DISK_BYTES_PER_SECOND = 20 << 20
_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_ABANDONED_SECONDS = 86_400


def load_index(
    path: Path, spec: IndexSpec, build: Callable[[], RecordIndex], index_mapping_dir: str | Path | None
) -> RecordIndex:
    """Return the index of a data file; build it if no valid index is found.

    An index is valid if it has the state of the data file (see `FileState`) and contains its status change time. If
    only the status change time differs, either the data was copied with its index, or a program replaced the data and
    restored the modification time. The hash of the whole file is then compared, and the new time is stored.

    `build` indexes the file; it is called at most once while the file does not change, and may set
    `RecordIndex.content`. Indexes are stored in `index_mapping_dir` (None or a parent of the file: beside the file),
    else in the user's cache; if that cannot be written either, the index stays in memory.

    Raises:
        UserError: from `build`, or if the file keeps changing.
    """
    paths = index_paths(path, spec, index_mapping_dir)
    for _ in range(3):
        state, ctime = FileState.of(path), path.stat().st_ctime_ns
        candidates = [index for each in paths if (index := read_index(each, spec, state)) is not None]
        for index in candidates:
            if ctime in index.ctimes_ns:
                return index
        index = _build_once(path, paths, spec, state, ctime, partial(_reuse_or_build, path, ctime, candidates, build))
        if FileState.of(path) == state and path.stat().st_ctime_ns == ctime:
            return index
    raise UserError(f"{path} changes while it is read: wait until it is written, then start again")


def _reuse_or_build(
    path: Path, ctime: int, candidates: Sequence[RecordIndex], build: Callable[[], RecordIndex]
) -> RecordIndex:
    """Return the candidate with the same content as the file, or build an index; add the status change time."""
    content = ContentHash(path).digest() if candidates else ""
    for index in candidates:
        if index.content == content:
            return replace(index, ctimes_ns=(*index.ctimes_ns, ctime))
    index = build()
    return replace(index, content=index.content or content or ContentHash(path).digest(), ctimes_ns=(ctime,))


def index_paths(path: Path, spec: IndexSpec, index_mapping_dir: str | Path | None) -> list[Path]:
    """Return the possible paths of an index, best first; they contain a hash of the specification."""
    label = hashlib.blake2b(json.dumps(spec, sort_keys=True).encode(), digest_size=4).hexdigest()
    first = path
    if index_mapping_dir and not path.is_relative_to(index_mapping_dir):
        first = _mirror(Path(index_mapping_dir), path)
    return [each.with_name(f"{path.name}.idx-{label}") for each in (first, _mirror(user_cache(), path.resolve()))]


def user_cache() -> Path:
    """Return the directory of indexes in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "bionemo", "index")


def _mirror(root: Path, path: Path) -> Path:
    """Append a path, without its leading '/' and any '..', to a root directory."""
    return root.joinpath(*(part for part in path.parts if part not in (path.anchor, "..")))


def _build_once(
    path: Path, paths: list[Path], spec: IndexSpec, state: FileState, ctime: int, build: Callable[[], RecordIndex]
) -> RecordIndex:
    def read(path: Path) -> RecordIndex | None:
        index = read_index(path, spec, state)
        return index if index is not None and ctime in index.ctimes_ns else None

    index: RecordIndex | None = None
    problem: OSError | None = None
    for each in paths:
        try:
            each.parent.mkdir(parents=True, exist_ok=True)
            with _build_lock(each, state.size):
                if (found := read(each)) is not None:
                    return found  # another process has built it
                index = index or build()
                write_index(each, spec, state, index)
                return read(each) or index
        except OSError as error:  # read-only or full: try the next directory
            problem = error
    index = index or build()
    if index.file is None:
        _warn_in_memory(path.parent, str(problem))
    return index


@cache
def _warn_in_memory(directory: Path, problem: str) -> None:
    _log.warning("indexes of %s are kept in memory, because they cannot be written (%s)", directory, problem)


@contextmanager
def _build_lock(path: Path, size: int) -> Iterator[None]:
    """Hold a lock next to an index. Without working locks several processes may build it, which only costs time.

    Raises:
        OSError: if the directory cannot be written.
    """
    lock_path = path.with_name(path.name + ".lock")
    lock = FileLock(lock_path, timeout=_LOCK_SECONDS + size / _SLOW_DISK_BYTES_PER_SECOND)
    try:
        lock.acquire()
    except Timeout:
        _log.warning("timeout while another process builds %s; building it here as well", path)
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise
    try:
        _remove_abandoned(path.parent)
        yield
    finally:
        if lock.is_locked:
            # A process that opens the lock after this finds a complete index, or fails to build one as this one did.
            lock_path.unlink(missing_ok=True)
            lock.release()


@cache
def _remove_abandoned(directory: Path) -> None:
    """Delete temporary files of processes that were killed; see `files.replacing`. Once: there may be many files."""
    for leftover in directory.glob(".*.idx-*.tmp"):
        with suppress(FileNotFoundError):  # its process may be alive and have renamed it
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                leftover.unlink()
