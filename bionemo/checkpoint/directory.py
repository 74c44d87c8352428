# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as directories: tensors in safetensors files, everything else in JSON, no pickle.

    step-dir/
        tensors-0.safetensors   pieces of tensors, a file for each process that wrote some
        index.json              whole shape of every tensor, and which pieces in which file make it up
        state.json              everything that is not a tensor of the model or the optimizer
        manifest.json           step, metrics, format version, checksum of every file, and one of all this

A checkpoint exists under its name only when it is complete: it is written beside it under a temporary name, flushed to
disk, renamed, and the rename flushed too. A manifest that does not match is a checkpoint that is not there.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bionemo.checkpoint.tensors import Piece, checksum, checksum_of, write, write_text
from bionemo.checkpoint.tree import encode
from bionemo.errors import UserError

FORMAT_VERSION = 2
STATE, INDEX, MANIFEST = "state.json", "index.json", "manifest.json"
_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_FILE = re.compile(r"index\.json|state\.json|tensors-\d+\.safetensors")  # no path, so nothing outside is ever opened

Exchange = Callable[[Any], list[Any]]  # gives a value of this process to all others, and takes theirs, by rank


def save(path: Path, state: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
    """Write a checkpoint under `path`, or leave nothing there.

    Args:
        path: the directory to make; an existing one is replaced.
        state: nested dicts, lists and tuples of numbers, strings, None and small tensors; `global_step` and `metrics`
            go into the manifest.
        pieces: of the tensors.

    Raises:
        UserError: when the disk is full or cannot be written; what was there before is untouched.
    """
    save_together(path, state, pieces, rank=0, exchange=lambda value: [value])


def save_together(
    path: Path, state: Mapping[str, Any], pieces: Iterable[Piece], rank: int, exchange: Exchange
) -> None:
    """As `save`, from several processes, each with its own pieces; the state is that of rank 0.

    When one of them fails, all of them raise what it had to say, and nothing is left.
    """
    unfinished = path.with_name(path.name + _UNFINISHED)

    def all_do(work: Callable[[], Any]) -> list[Any]:
        """Work on every process, and only go on when all have succeeded."""
        done, failure = None, None
        try:
            with _disk_errors(path):
                done = work()
        except Exception as error:
            failure = error
        results = exchange((done, failure and str(failure)))
        if failures := [failure for _, failure in results if failure is not None]:
            if rank == 0:
                _delete(unfinished)
            raise failure or UserError(failures[0])
        return [done for done, _ in results]

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete(unfinished)
        unfinished.mkdir()

    def write_pieces() -> tuple[str, str, list[Any]] | None:
        mine = list(pieces)
        if not mine:
            return None
        name = f"tensors-{rank}.safetensors"
        entries = [(p.name, p.shape, p.key, p.offset, tuple(p.values.shape)) for p in mine]
        return name, write(unfinished / name, mine), entries

    def finish(written: list[Any]) -> None:
        files = {name: digest for name, digest, _ in written}
        files[INDEX] = write_text(unfinished / INDEX, json.dumps(_index(written)))
        files[STATE] = write_text(unfinished / STATE, json.dumps(encode(dict(state))))
        manifest = {
            "format": FORMAT_VERSION,
            "step": state["global_step"],
            "metrics": state.get("metrics", {}),
            "bytes": {name: (unfinished / name).stat().st_size for name in files},
            "xxh3_128": files,
        }
        write_text(unfinished / MANIFEST, _sealed(manifest))
        _publish(unfinished, path)

    all_do(begin if rank == 0 else lambda: None)
    written = [part for part in all_do(write_pieces) if part]
    all_do((lambda: finish(written)) if rank == 0 else lambda: None)


def _index(written: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for file, _, entries in written:
        for name, shape, key, offset, size in entries:
            index.setdefault(name, {"shape": shape, "pieces": []})["pieces"].append((file, key, offset, size))
    return index


def check(path: Path) -> None:
    """Verify a checkpoint.

    Raises:
        UserError: when it is damaged or of a format this version does not know.
    """
    if problem := defect(path):
        raise UserError(f"checkpoint {path} cannot be used: {problem}; take another or remove it")


class _Defect(ValueError):
    """What is wrong with a checkpoint."""


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def defect(path: Path) -> str:
    """Say what is wrong with a checkpoint, "" when it is whole."""
    try:
        manifest = _manifest(path)
        for name, size in manifest["bytes"].items():
            if (found := _size(path / name)) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        for name, expected in manifest["xxh3_128"].items():
            if checksum(path / name) != expected:
                return f"{name} does not match its checksum"
    except _Defect as error:
        return str(error)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except _UNREADABLE as error:
        return f"it is unreadable ({error})"
    return ""


def manifest_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, empty when it says nothing that can be believed."""
    try:
        return _manifest(path)
    except _UNREADABLE:
        return {}


def _manifest(path: Path) -> dict[str, Any]:
    _size(path / MANIFEST)
    text = (path / MANIFEST).read_text()
    manifest: dict[str, Any] = json.loads(text)
    if (version := manifest["format"]) != FORMAT_VERSION:
        raise _Defect(f"format {version} is not the {FORMAT_VERSION} of this version")
    del manifest["seal"]
    if text != _sealed(manifest):
        raise _Defect(f"{MANIFEST} was changed after it was written")
    match manifest:
        case {"step": int(), "metrics": dict(), "bytes": dict(sizes), "xxh3_128": dict(files)}:
            if {INDEX, STATE} <= files.keys() == sizes.keys() and all(map(_FILE.fullmatch, files)):
                return manifest
    raise _Defect(f"{MANIFEST} does not describe a checkpoint")


def _sealed(manifest: dict[str, Any]) -> str:
    """Text of a manifest; a file that differs from it by as much as a space was not written here."""
    return json.dumps(manifest | {"seal": checksum_of(json.dumps(manifest).encode())}, indent=1)


def _size(file: Path) -> int:
    """Bytes of a plain file; whoever wrote the checkpoint may have put a link or a pipe there."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise _Defect(f"{file.name} is not a plain file")
    return status.st_size


def complete(*directories: Path) -> list[Path]:
    """Checkpoints in directories, newest step first; not yet verified."""
    steps = {path: manifest.get("step", -1) for path in _candidates(directories) if (manifest := manifest_of(path))}
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def _candidates(directories: tuple[Path, ...]) -> list[Path]:
    within = [path for directory in directories for path in directory.glob("*") if path.is_dir()]
    return [path for path in within if not (path.name.endswith(_UNFINISHED) or _succeeded(path))]


def _succeeded(path: Path) -> bool:
    """Whether a checkpoint was to be removed when its successor had its name, and that is so."""
    return path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)).exists()


def link(source: Path, path: Path) -> None:
    """Give a checkpoint a second name without writing it again (hard links; a copy where these are not possible).

    Raises:
        UserError: as `save`.
    """
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with _disk_errors(path):
            _delete(unfinished)
            unfinished.mkdir()
            for name in (*_manifest(source)["bytes"], MANIFEST):
                _link_or_copy(source / name, unfinished / name)
            _publish(unfinished, path)
    except UserError:
        _delete(unfinished)
        raise


def _link_or_copy(file: Path, new: Path) -> None:
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)
        _flush(new)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Say in one line what the disk refused."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"checkpoint {path} could not be written ({error.strerror or error}): make room or point "
            "exp_manager.exp_dir elsewhere; earlier checkpoints are untouched and the same command resumes from them"
        ) from error


def remove(path: Path) -> None:
    """Delete a checkpoint; the rename first, so that a half-deleted one is never taken for one."""
    doomed = path.with_name(path.name + _UNFINISHED)
    _delete(doomed)
    path.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a directory or a file as far as possible; of a link, only the link."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def newest(directories: Iterable[Path], on_defect: Callable[[Path, str], None]) -> Path | None:
    """The checkpoint of the highest step that is whole; `on_defect(path, problem)` hears of those passed over."""
    places = tuple(directories)
    nameless = [path for path in _candidates(places) if (path / STATE).exists() and not manifest_of(path)]
    for path in sorted(nameless) + complete(*places):
        if not (problem := defect(path)):
            return path
        on_defect(path, problem)
    return None


def clean(directory: Path) -> None:
    """Remove what interrupted saves left behind."""
    for path in directory.glob("*"):
        if path.name.endswith(_UNFINISHED) or _succeeded(path):
            _delete(path)


def _publish(unfinished: Path, path: Path) -> None:
    """Move a complete directory to its name, durably; what was there stays whole until then, and findable."""
    _flush(unfinished)
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():
        _delete(replaced)
        os.rename(path, replaced)
    os.rename(unfinished, path)
    _flush(path.parent)
    if replaced.exists():
        remove(replaced)


def _flush(path: Path) -> None:
    """See that a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
