# SPDX-License-Identifier: Apache-2.0
"""How checkpoints come to their names, are found, and go.

A checkpoint exists under its name only when it is complete: it is written beside it under a temporary name, flushed to
disk, renamed, and the rename flushed too. It goes the other way round.

Only files that a checkpoint may have are deleted: other files in its directory stay.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bionemo.checkpoint.manifest import MANIFEST, STATE, defect, manifest_of, read_manifest
from bionemo.common.errors import UserError
from bionemo.common.files import sync

_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_FILES = r"(index|state|manifest)\.json|tensors-\d+\.safetensors"


def unfinished(path: Path) -> Path:
    """Where what will have a name is written until it is complete."""
    return path.with_name(path.name + _UNFINISHED)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, whole or damaged."""
    return (path / MANIFEST).is_file() or (path / STATE).is_file()


def publish(path: Path, is_ours: Callable[[Path], bool] = is_checkpoint, names: str = _FILES) -> None:
    """Give what is complete its name, durably; what had it before stays whole until then, and findable.

    Args:
        path: the name.
        is_ours: whether what has the name may be replaced.
        names: regular expression of the whole names of the files that are deleted of what is replaced.

    Raises:
        UserError: when something else has the name.
    """
    new, replaced = unfinished(path), path.with_name(path.name + _REPLACED)
    sync(new)
    if path.exists():
        if not is_ours(path):
            raise UserError(f"{path} exists and is not a checkpoint: move it away, or choose another name")
        delete(replaced, names)
        os.rename(path, replaced)
    os.rename(new, path)
    sync(path.parent)
    if replaced.exists():
        remove(replaced, names)


def link(source: Path, path: Path) -> None:
    """Give a checkpoint a second name without writing it again (hard links; a copy where these are not possible).

    Raises:
        UserError: as `save`.
    """
    new = unfinished(path)
    with disk_errors(path):
        delete(new)
        new.mkdir()
    try:
        with disk_errors(path):
            for name in (*read_manifest(source)["bytes"], MANIFEST):
                _link_or_copy(source / name, new / name)
            publish(path)
    except UserError:
        delete(new)
        raise


def _link_or_copy(file: Path, new: Path) -> None:
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)
        sync(new)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one line what the disk refused."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"checkpoint {path} could not be written ({error.strerror or error}): make room or point "
            "exp_manager.exp_dir elsewhere; earlier checkpoints are untouched and the same command resumes from them"
        ) from error


def remove(path: Path, names: str = _FILES) -> None:
    """Delete a checkpoint; the rename first, so that a half-deleted one is never taken for one.

    When other files are in its directory, they stay there.
    """
    doomed = unfinished(path)
    delete(doomed, names)
    path.rename(doomed)
    delete(doomed, names)
    if doomed.exists():
        doomed.rename(path)


def delete(path: Path, names: str = _FILES) -> None:
    """Delete files in a directory as far as possible, and the directory when it is empty; of a link, only the link.

    Args:
        path: the directory.
        names: regular expression of the whole names of the files.
    """
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        for file in path.iterdir():
            if re.fullmatch(names, file.name):
                with suppress(OSError):
                    file.unlink()
        path.rmdir()


def clean(directory: Path) -> None:
    """Remove what interrupted saves left behind: directories that hold nothing but files of a checkpoint."""
    for path in directory.glob("*"):
        if (path.name.endswith(_UNFINISHED) or _succeeded(path)) and _holds_only_ours(path):
            delete(path)


def _holds_only_ours(path: Path) -> bool:
    return path.is_symlink() or (path.is_dir() and all(re.fullmatch(_FILES, file.name) for file in path.iterdir()))


def _succeeded(path: Path) -> bool:
    """Whether a checkpoint was to be removed when its successor had its name, and that is so."""
    return path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)).exists()


def complete(*directories: Path) -> list[Path]:
    """Checkpoints in directories, newest step first; not yet verified."""
    steps = {path: manifest.get("step", -1) for path in _candidates(directories) if (manifest := manifest_of(path))}
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def _candidates(directories: tuple[Path, ...]) -> list[Path]:
    within = [path for directory in directories for path in directory.glob("*") if path.is_dir()]
    return [path for path in within if not (path.name.endswith(_UNFINISHED) or _succeeded(path))]


def newest(
    directories: Iterable[Path], on_defect: Callable[[Path, str], None], ignored: Collection[Path] = ()
) -> Path | None:
    """The checkpoint of the highest step that is whole; `on_defect(path, problem)` hears of those passed over."""
    places = tuple(directories)
    nameless = [path for path in _candidates(places) if (path / STATE).exists() and not manifest_of(path)]
    for path in sorted(nameless) + complete(*places):
        if path in ignored:
            continue
        if not (problem := defect(path)):
            return path
        on_defect(path, problem)
    return None
