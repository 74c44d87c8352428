# SPDX-License-Identifier: Apache-2.0
"""Index of a text file: where its records are. It is built once and stored beside the file as a safetensors file."""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from filelock import FileLock
from safetensors.numpy import save
from xxhash import xxh3_128

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.common.mapped import MappedFile

_log = logging.getLogger(__name__)
_VERSION = 6  # increase it when the records of a file change
_SAMPLES = 18  # the beginning, the end, and sixteen between
_SAMPLE_BYTES = 16 << 10
_HASHED_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10  # a smaller index is read, not mapped: a mapped file stays open, and there may be thousands
_LOCK_SECONDS = 3600
T = TypeVar("T")


class UnwritableError(Exception):
    """No directory for a file that is derived from a data file can be written."""


class FileState(NamedTuple):
    """Size, modification time and hash of samples of a data file."""

    size: int
    mtime_ns: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Read the state of a file, with a hash of 18 evenly spaced samples of 16 KiB.

        The state changes with the size, the modification time, any byte of a file of up to 288 KiB, and any byte of
        the samples of a larger one.
        """
        with path.open("rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            digest = hashlib.blake2b(digest_size=16)
            last = max(0, state.st_size - _SAMPLE_BYTES)
            for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
        return cls(state.st_size, state.st_mtime_ns, digest.hexdigest())


def hash_file(file: MappedFile) -> str:
    """Return the xxh3_128 hash of a whole file."""
    digest = xxh3_128()
    for start in range(0, len(file), _HASHED_BYTES):
        file.check()
        digest.update(file.data[start : start + _HASHED_BYTES])
    return digest.hexdigest()


@dataclass(frozen=True)
class RecordIndex:
    """Offsets in bytes of the n records of a file."""

    start: np.ndarray  # int64 [n], start of the record
    # int64 [n], start of the sequence if its letters are consecutive in the file; ~start if other bytes are between
    # them and the record ends with the sequence; else -1
    sequence: np.ndarray
    size: np.ndarray  # int32 [n], bytes of the record
    letters: np.ndarray  # int32 [n], letters of the sequence
    stops: int  # number of proteins with a stop codon, `*`, at the end, which is not part of the sequence
    xxh3_128: str  # hash of the whole file
    file: MappedFile | None = None  # the mapped index file of the arrays; None if they are in memory

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in ("start", "sequence", "size", "letters")}


def load_index(
    path: Path, spec: dict[str, Any], build: Callable[[], RecordIndex], index_mapping_dir: str | Path | None
) -> RecordIndex:
    """Return the index of a data file; build it if there is no index of its present state (see `FileState`).

    Args:
        path: the data file.
        spec: format of the file, as JSON values.
        build: indexes the file.
        index_mapping_dir: directory of the index; None or a parent of the file: beside the file. If it cannot be
            written, the index is in the user's cache, or else in memory.

    Raises:
        UserError: from `build`, or if the file changes meanwhile.
    """
    index: RecordIndex | None = None

    def write(target: Path, identity: str) -> None:
        nonlocal index
        index = index or build()
        write_index(target, identity, index)

    try:
        return find_or_write(path, spec, index_paths(path, spec, index_mapping_dir), read_index, write)
    except UnwritableError as error:
        _warn_in_memory(path.parent, str(error))
        return index or build()


def find_or_write(
    path: Path,
    spec: dict[str, Any],
    targets: Sequence[Path],
    read: Callable[[Path, str], T | None],
    write: Callable[[Path, str], None],
) -> T:
    """Return what is derived from a data file; derive it if it does not exist for the file's present state.

    Args:
        path: the data file.
        spec: what determines the result, as JSON values.
        targets: possible paths of the result, best first.
        read: returns the result from a path; None if it is missing, damaged or of another identity.
        write: writes the result with an identity to a path, atomically.

    Raises:
        UnwritableError: if no path can be written.
        UserError: from `write`, or if the data file changes meanwhile.
    """
    state = FileState.of(path)
    identity = json.dumps([_VERSION, spec, state], sort_keys=True)
    for each in targets:
        if (found := read(each, identity)) is not None:
            return found
    problem = ""
    for each in targets:
        try:
            each.parent.mkdir(parents=True, exist_ok=True)
            with _build_lock(each):
                if (found := read(each, identity)) is None:  # no other process has written it
                    write(each, identity)
                    if FileState.of(path) != state:
                        each.unlink()
                        raise UserError(f"{path} changes while it is read: wait until it is written, then start again")
                    found = read(each, identity)
            if found is not None:
                return found
        except OSError as error:  # read-only or full: try the next directory
            problem = str(error)
    raise UnwritableError(problem)


def write_index(path: Path, identity: str, index: RecordIndex) -> None:
    """Write an index file atomically; checksums detect one that did not reach the disk."""
    about = {
        "identity": identity,
        "stops": str(index.stops),
        "xxh3_128": index.xxh3_128,
        "checksums": _checksums(index),
    }
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(save(index.arrays(), about))


def read_index(path: Path, identity: str) -> RecordIndex | None:
    """Map an index file into memory, or read a small one. Return None if it is missing, damaged or of other data."""
    try:
        with path.open("rb") as file:
            start = int.from_bytes(file.read(8), "little") + 8
            layout = json.loads(file.read(start - 8))
        about = layout.pop("__metadata__")
        mapped = MappedFile(path) if path.stat().st_size > _SMALL_BYTES else None
        data = memoryview(path.read_bytes() if mapped is None else mapped.data)[start:]
        arrays = {
            name: np.frombuffer(data[slice(*entry["data_offsets"])], {"I64": "<i8", "I32": "<i4"}[entry["dtype"]])
            for name, entry in layout.items()
        }
        index = RecordIndex(**arrays, stops=int(about["stops"]), xxh3_128=about["xxh3_128"], file=mapped)
        return index if about["identity"] == identity and about["checksums"] == _checksums(index) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError):
        return None


def _checksums(index: RecordIndex) -> str:
    return " ".join(str(zlib.crc32(array.data)) for array in index.arrays().values())


def index_paths(
    path: Path, spec: dict[str, Any], index_mapping_dir: str | Path | None, kind: str = "idx"
) -> list[Path]:
    """Return the possible paths of an index, best first; they contain `kind` and a hash of the specification."""
    label = hashlib.blake2b(json.dumps(spec, sort_keys=True).encode(), digest_size=4).hexdigest()
    first = path
    if index_mapping_dir and not path.is_relative_to(index_mapping_dir):
        first = _mirror(Path(index_mapping_dir), path)
    return [each.with_name(f"{path.name}.{kind}-{label}") for each in (first, _mirror(user_cache(), path.resolve()))]


def user_cache() -> Path:
    """Return the directory of indexes in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "bionemo", "index")


def _mirror(root: Path, path: Path) -> Path:
    """Append a path, without its leading '/' and any '..', to a root directory."""
    return root.joinpath(*(part for part in path.parts if part not in (path.anchor, "..")))


@cache
def _warn_in_memory(directory: Path, problem: str) -> None:
    _log.warning("indexes of %s are kept in memory, because they cannot be written (%s)", directory, problem)


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Hold a lock beside an index. Without one, several processes may build the index, which only costs time."""
    lock = FileLock(f"{path}.lock", timeout=_LOCK_SECONDS)
    with suppress(OSError, NotImplementedError):  # a timeout is an OSError
        lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
