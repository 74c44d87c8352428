# SPDX-License-Identifier: Apache-2.0
"""Data sets in object stores: before a run starts, the files of its splits are copied to a cache of this machine.

Every epoch is a permutation of all records, so that all files are needed at once. The cache is `bionemo/data` in
`XDG_CACHE_HOME`. `NAME` there contains the files of a data set and `.fetched.json`, their sizes and tags. While a
process uses the data set, it shares the lock `NAME.used`, whose modification time is that of the last use; one process
at a time holds `NAME.lock` and fetches.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import IO, Any

from bionemo.common.console import notify
from bionemo.common.errors import HostError, UserError, optional_dependency
from bionemo.common.files import replacing, write_atomic
from bionemo.common.progress import progress

LIMIT = "BIONEMO_CACHE_GB"  # variable: size of the cache in GB (1e9 bytes)
_FREE_SHARE = 0.9  # of the free disk space, for the cache
_BLOCK_BYTES = 8 << 20
_THREADS = 8
_RECORD = ".fetched.json"
_VARIABLES = {  # the libraries read others, too
    "s3": " in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL",
    "gs": " in GOOGLE_APPLICATION_CREDENTIALS",
    "az": " in AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
Entry = tuple[int, str]  # size; sha256 of the manifest, or else what identifies the content in the store, such as ETag
_fetched: dict[tuple[str, str], IO[bytes]] = {}  # by data set and label: the lock that this process holds to its end


def is_url(path: str | None) -> bool:
    """Return whether a path is a URL."""
    return path is not None and "://" in path


def local_path(path: str, root: str | None) -> Path:
    """Return a path, or the path in the cache of a URL, which may be below that of the data set, `root`."""
    if not is_url(path):
        return Path(path)
    base = (root if root and f"{path}/".startswith(f"{root.rstrip('/')}/") else path).rstrip("/")
    name = re.sub("[^A-Za-z0-9]+", "-", base)[-40:] + "-" + hashlib.blake2b(base.encode(), digest_size=8).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache, "bionemo", "data", name, path[len(base) :].strip("/"))


def fetch(root: str, label: str, choose: Callable[[Collection[str]], Iterable[str]]) -> None:
    """Copy files of a data set to the cache, unless they are there and unchanged.

    The files are described by `manifest.json` (sizes and sha256), or else listed (sizes and ETags).

    Args:
        root: URL of the data set.
        label: name of the files for messages; a process fetches those of a label once.
        choose: selects files of the data set, whose names are relative to `root`.

    Raises:
        UserError: from `choose`; if the store cannot be read, a file is not as described, or it does not fit.
    """
    if (root, label) in _fetched:
        return
    with _store_errors(root):
        from fsspec.core import url_to_fs

        store, path = url_to_fs(root.rstrip("/"), skip_instance_cache=True)
        files = _describe_files(store, path, root)
    wanted = {name: files[name] for name in choose(files)}
    directory = local_path(root, root)
    directory.parent.mkdir(parents=True, exist_ok=True)
    used = _lock(directory.with_suffix(".used"), fcntl.LOCK_SH)
    os.utime(used.name)
    with _lock(directory.with_suffix(".lock"), fcntl.LOCK_EX):
        for interrupted in directory.rglob(".*.tmp"):
            interrupted.unlink()
        record = {}
        with suppress(OSError, ValueError):
            record = json.loads((directory / _RECORD).read_text())
        missing = {
            name: entry
            for name, entry in wanted.items()
            if record.get(name) != [*entry] or not (directory / name).is_file()
        }
        if missing:
            size = sum(size for size, _ in missing.values())
            _make_room(directory.parent, size, f"{root} ({label})")
            notify(f"{len(missing)} files ({size / 1e9:,.2f} GB) of {root} ({label}) are copied to {directory}")
            with _store_errors(root), progress(f"fetching {label}", size) as advance:
                for name in _fetch_files(store, path, directory, missing, advance):
                    record[name] = missing[name]
                    write_atomic(directory / _RECORD, json.dumps(record))
    _fetched[root, label] = used


def _describe_files(store: Any, path: str, root: str) -> dict[str, Entry]:
    """Return size and tag of each file of a data set."""
    try:
        return {
            name: (int(entry["size"]), str(entry["sha256"]))
            for name, entry in json.loads(store.cat_file(f"{path}/manifest.json"))["files"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{root}/manifest.json is not a valid manifest ({error}): upload it again") from error
    except FileNotFoundError:
        if root.startswith("http"):
            raise UserError(f"{root} has no manifest.json, which names its files: upload it, too") from None
    return {
        name.removeprefix(path).lstrip("/"): (
            about["size"],
            str(next((about[tag] for tag in ("ETag", "etag", "mtime") if about.get(tag)), "")),
        )
        for name, about in store.find(path, detail=True).items()
    }


def _fetch_files(
    store: Any, path: str, directory: Path, files: dict[str, Entry], advance: Callable[[int], object]
) -> Iterator[str]:
    """Fetch files in parallel; yield the name of each when it is complete."""
    stop = Event()

    def fetch_file(name: str) -> str:
        size, tag = files[name]
        target, digest = directory / name, hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as new:
            with (
                store.open(f"{path}/{name}", block_size=_BLOCK_BYTES, cache_type="none") as source,
                new.open("xb") as file,
            ):
                while not stop.is_set() and (block := source.read(_BLOCK_BYTES)):
                    file.write(block)
                    digest.update(block)
                    advance(len(block))
            found = new.stat().st_size, digest.hexdigest() if re.fullmatch("[0-9a-f]{64}", tag) else tag
            if found != (size, tag):
                raise UserError(
                    f"{path}/{name} has {found[0]:,} bytes and the tag {found[1]}, but {size:,} bytes and {tag} are "
                    "stated: upload the file, or the data set with its manifest, again"
                )
        return name

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for future in as_completed([pool.submit(fetch_file, name) for name in files]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _make_room(cache: Path, needed: int, label: str) -> None:
    """Delete data sets that no process uses, the least recently used first, until a split fits."""
    try:
        limit = float(os.environ.get(LIMIT) or "inf") * 1e9
    except ValueError as error:
        raise HostError(f"{LIMIT}={os.environ[LIMIT]} is not a number of GB: correct it") from error

    def find_room() -> float:
        held = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) if limit < float("inf") else 0
        return min(_FREE_SHARE * shutil.disk_usage(cache).free, limit - held)

    unused = sorted(cache.glob("*.used"), key=lambda file: file.stat().st_mtime)
    while (room := find_room()) < needed and unused:
        path = unused.pop(0)
        with suppress(BlockingIOError), _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    if room < needed:
        raise HostError(
            f"{label} needs {needed / 1e9:,.2f} GB, and {max(0, room) / 1e9:,.2f} GB are available in {cache}: free "
            f"disk space, set XDG_CACHE_HOME to another disk, or raise {LIMIT}"
        )


def _lock(path: Path, operation: int) -> IO[bytes]:
    """Return an open file with a lock, which is released when the file is closed or the process ends."""
    file = path.open("ab")
    fcntl.flock(file, operation)
    return file


@contextmanager
def _store_errors(root: str) -> Iterator[None]:
    """Replace errors of the libraries of object stores, which have no common class, by a HostError."""
    scheme = root.partition("://")[0]
    try:
        with optional_dependency("store", f"{scheme}://"):
            yield
    except Exception as error:
        if isinstance(error, UserError) or getattr(error, "filename", None):  # a local file
            raise
        raise HostError(
            f"{root} cannot be read ({' '.join(str(error).split()) or type(error).__name__}): check the address and "
            f"the credentials{_VARIABLES.get(scheme, '')}"
        ) from error
