# SPDX-License-Identifier: Apache-2.0
"""Atomic creation, listing and removal of checkpoint directories.

A checkpoint is written under a temporary name, flushed to disk and renamed when it is complete; to remove it, it is
renamed first. Only files that a checkpoint can have are deleted: other files in its directory stay.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bionemo.checkpoint.manifest import MANIFEST, STATE, find_damage, load_manifest, read_branch
from bionemo.common.errors import UserError
from bionemo.common.files import sync

_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_FILES = r"(index|state|manifest)\.json|tensors-\d+\.safetensors"


def unfinished(path: Path) -> Path:
    """Return the temporary path under which `path` is written."""
    return path.with_name(path.name + _UNFINISHED)


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, complete or damaged."""
    return (path / MANIFEST).is_file() or (path / STATE).is_file()


def publish(path: Path, is_ours: Callable[[Path], bool] = is_checkpoint, names: str = _FILES) -> None:
    """Rename `unfinished(path)` to `path`; a directory that it replaces remains readable until then.

    Args:
        path: final path of the directory.
        is_ours: whether an existing directory may be replaced.
        names: regular expression of the file names that may be deleted in the replaced directory.

    Raises:
        UserError: if something else exists at `path`.
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
    """Create a second name of a checkpoint with hard links; its files are copied where these are not possible.

    Errors as in `save`.
    """
    new = unfinished(path)
    with disk_errors(path):
        delete(new)
        new.mkdir()
    try:
        if not (manifest := load_manifest(source)):
            raise UserError(f"checkpoint {source} cannot be used: its {MANIFEST} is missing or invalid")
        with disk_errors(path):
            for name in (*manifest["bytes"], MANIFEST):
                try:
                    os.link(source / name, new / name)
                except OSError:
                    shutil.copyfile(source / name, new / name)
                    sync(new / name)
            publish(path)
    except UserError:
        delete(new)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Replace an OSError by a UserError about the checkpoint at `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"checkpoint {path} could not be written ({error.strerror or error}): free disk space or choose another "
            "exp_manager.exp_dir; earlier checkpoints are unchanged and the same command resumes from them"
        ) from error


def remove(path: Path, names: str = _FILES) -> None:
    """Delete a checkpoint but no other files in it. Rename it first, so that a partly deleted one is never used."""
    renamed = unfinished(path)
    delete(renamed, names)
    path.rename(renamed)
    delete(renamed, names)
    if renamed.exists():
        renamed.rename(path)


def delete(path: Path, names: str = _FILES) -> None:
    """Delete files in a directory, and the directory if it is then empty. If the path is a link, delete only the link.

    Files that cannot be deleted stay.

    Args:
        path: the directory.
        names: regular expression of the names of the files to delete.
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


def remove_unfinished(directory: Path) -> None:
    """Remove temporary directories of interrupted saves that contain only files of a checkpoint."""
    for path in directory.glob("*"):
        leftover = path.name.endswith(_UNFINISHED) or _is_superseded(path)
        if not leftover:
            continue
        if path.is_symlink() or (path.is_dir() and all(re.fullmatch(_FILES, file.name) for file in path.iterdir())):
            delete(path)


def _is_superseded(path: Path) -> bool:
    """Return whether a save replaced this checkpoint, but was interrupted before it deleted it."""
    return path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)).exists()


def list_complete(*directories: Path) -> list[Path]:
    """Return the checkpoints with a valid manifest in directories, newest first; files are not verified.

    The newest one has the highest step of the last branch; see `Branch`.
    """
    order = {
        path: (read_branch(manifest).number, manifest["step"], path.name)
        for path in _subdirectories(directories)
        if (manifest := load_manifest(path))
    }
    return sorted(order, key=lambda path: order[path], reverse=True)


def _subdirectories(directories: Iterable[Path]) -> list[Path]:
    paths = [path for directory in directories for path in directory.glob("*") if path.is_dir()]
    return [path for path in paths if not (path.name.endswith(_UNFINISHED) or _is_superseded(path))]


def find_newest(
    directory: Path, on_damage: Callable[[Path, str], None], ignored: Collection[Path] = ()
) -> Path | None:
    """Return the newest undamaged checkpoint; call `on_damage(path, problem)` for damaged ones."""
    no_manifest = [
        path for path in _subdirectories([directory]) if (path / STATE).exists() and not load_manifest(path)
    ]
    for path in sorted(no_manifest) + list_complete(directory):
        if path in ignored:
            continue
        if not (problem := find_damage(path)):
            return path
        on_damage(path, problem)
    return None
