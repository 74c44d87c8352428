# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of an output directory: files are staged, then moved into place when the data set is complete.

A staging directory, `.preparing-<8 hexadecimal digits>` in the output directory, carries this project's marker. When
the data set is complete, a list of moves is written into it. Then the files and directories are moved one by one, the
manifest last. If a job is killed before the list is written, the next start removes the staging directory. If it is
killed afterwards, the next start completes the moves.

The output directory may contain files of other origin: only marked staging directories are used, names must be valid
names of outputs, and of the replaced files only those listed in the old manifest and their indexes are deleted.
"""

import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.files import MARKER, create_owned, identity_of, is_unmarked, sync, write_atomic
from bionemo.common.regular import load_json
from bionemo.data.shards.ranges import INDEX
from bionemo.preparation.checksums import OutputFile, checksum_file
from bionemo.preparation.manifest import Manifest
from bionemo.preparation.output_names import DIRECTORIES, MANIFEST, STAGING_PREFIX, is_shard, is_top_level

log = logging.getLogger(__name__)
_NAME = re.compile(re.escape(STAGING_PREFIX) + "[0-9a-f]{8}")
_MOVES, _REPLACED, _MARKER_KIND = "moves.json", "replaced", "preparation"
_MAX_MOVES_BYTES = 1 << 20


@dataclass(frozen=True)
class StagingDirectory:
    """The staging directory `path` of the output directory `target`."""

    target: Path
    path: Path

    @classmethod
    def create(cls, target: Path) -> "StagingDirectory":
        """Create a directory with a unique name, so that late writes of a killed job do no harm."""
        staging = cls(target, target / f"{STAGING_PREFIX}{uuid.uuid4().hex[:8]}")
        try:
            create_owned(staging.path, _MARKER_KIND)
            staging.tree.mkdir()
            staging.scratch.mkdir()
        except BaseException:
            shutil.rmtree(staging.path, ignore_errors=True)
            raise
        return staging

    @property
    def tree(self) -> Path:
        """Directory of the data set's files, with the same relative paths as in the output."""
        return self.path / "tree"

    @property
    def scratch(self) -> Path:
        """Directory of temporary files."""
        return self.path / "scratch"

    @property
    def is_complete(self) -> bool:
        """Whether the data set is complete and must be moved."""
        return os.path.lexists(self.path / _MOVES)

    def commit(self, replaced: Iterable[str]) -> None:
        """Move all files into place, and remove the names `replaced` at the top of the output in any case."""
        names = {*(path.name for path in self.tree.iterdir()), *replaced}
        for directory, _, _ in os.walk(self.tree):
            sync(Path(directory))
        write_atomic(self.path / _MOVES, json.dumps({name: (self.tree / name).exists() for name in sorted(names)}))
        self.move()

    def move(self) -> None:
        """Move all files that have not been moved yet into place, and remove the staging directory.

        Raises:
            UserError: if the content is not that of an interrupted preparation; nothing is moved.
        """
        moves = self._read_moves()
        if (self.tree / MANIFEST).exists():  # it moves last: if it is gone, all moves are done
            (self.path / _REPLACED).mkdir(exist_ok=True)
            self._displace(MANIFEST)  # the output has no manifest until all moves are done
            for name, is_new in sorted(moves.items()):
                if name == MANIFEST or (is_new and not (self.tree / name).exists()):
                    continue  # the latter was moved before the interruption
                self._displace(name)
                if is_new:
                    os.rename(self.tree / name, self.target / name)
            os.rename(self.tree / MANIFEST, self.target / MANIFEST)
            sync(self.target)
        self.remove()

    def _displace(self, name: str) -> None:
        if os.path.lexists(self.target / name):
            os.rename(self.target / name, self.path / _REPLACED / name)

    def _read_moves(self) -> dict[str, bool]:
        """Check the staging directory; return for each name in the list whether the new data set contains it."""
        try:
            moves = load_json(self.path / _MOVES, _MAX_MOVES_BYTES)
            if not isinstance(moves, dict) or not all(map(_is_valid_move, moves.items())):
                raise ValueError(f"{_MOVES} contains a name that a preparation does not write")
            for path in (self.tree, self.path / _REPLACED):
                if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                    raise ValueError(f"{path.name} is not a directory")
            if (self.tree / MANIFEST).exists():
                _check_tree(self.tree)
        except ValueError as error:
            raise UserError(
                f"{self.path} is not a valid staging directory ({error}): remove it, then start again"
            ) from error
        return moves

    def remove(self) -> None:
        """Delete the staging directory; replaced files that were not written by a preparation are kept beside it."""
        replaced = self.path / _REPLACED
        if replaced.is_dir() and not replaced.is_symlink():
            kept = self.target / f"replaced-{self.path.name.removeprefix(STAGING_PREFIX)}"
            _delete_listed_files(replaced)
            if replaced.exists():
                os.rename(replaced, kept)
                sync(self.target)
                log.warning(
                    "note: replaced files that bionemo did not write, or that were changed, are now in %s", kept
                )
        for path in self.path.iterdir():
            if path.name in (MARKER, _MOVES):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        (self.path / _MOVES).unlink(missing_ok=True)
        if [path.name for path in self.path.iterdir()] == [MARKER]:  # otherwise the next start removes it
            (self.path / MARKER).unlink()
            with suppress(OSError):
                self.path.rmdir()


def is_interrupted(target: Path) -> bool:
    """Return whether an earlier preparation left files that `recover` completes or removes."""
    return bool(_find_staging(target)) or any(map(is_unmarked, _find_named(target)))


def recover(target: Path) -> None:
    """Complete interrupted moves and remove incomplete data sets.

    Raises:
        UserError: if the content of a staging directory is not that of an interrupted preparation.
    """
    for staging in _find_staging(target):
        if staging.is_complete:
            staging.move()
    for staging in _find_staging(target):
        log.info("starting again: an earlier preparation of %s was interrupted", target)
        staging.remove()
    for path in _find_named(target):
        if is_unmarked(path):
            for temporary in path.iterdir():
                temporary.unlink()
            path.rmdir()
        elif identity_of(path, _MARKER_KIND) is None:
            log.warning("note: %s was not created by bionemo and is left as it is", path)


def _find_staging(target: Path) -> list[StagingDirectory]:
    """Find the staging directories with this project's marker."""
    return [
        StagingDirectory(target, path) for path in _find_named(target) if identity_of(path, _MARKER_KIND) is not None
    ]


def _find_named(target: Path) -> Iterator[Path]:
    for path in sorted(target.glob(f"{STAGING_PREFIX}*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _is_valid_move(move: tuple[str, object]) -> bool:
    name, is_new = move
    return isinstance(is_new, bool) and (name in DIRECTORIES or name == MANIFEST or (is_new and is_top_level(name)))


def _check_tree(tree: Path) -> None:
    """Raise a ValueError unless all files are regular and listed in a valid manifest with their sizes."""
    manifest = Manifest.load(tree / MANIFEST)
    for directory, directories, files in os.walk(tree):
        for name in (*directories, *files):
            path = Path(directory, name)
            found, relative = path.lstat(), path.relative_to(tree).as_posix()
            if name in directories and stat.S_ISDIR(found.st_mode):
                continue
            entry = manifest.files.get(relative)
            if relative != MANIFEST and (entry is None or entry.size != found.st_size):
                raise ValueError(f"{relative!a} is not in its manifest")
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{relative!a} is not a regular file")


def _delete_listed_files(replaced: Path) -> None:
    """Delete a replaced data set: the files listed in its manifest, their indexes, then empty directories."""
    try:
        manifest = Manifest.read(replaced)
    except UserError:
        manifest = None
    listed = manifest.files if manifest else {}
    for directory, _, files in os.walk(replaced, topdown=False):
        for name in files:
            path = Path(directory, name)
            relative = path.relative_to(replaced).as_posix()
            is_index = INDEX.search(name) and INDEX.sub("", relative) in listed
            if is_index or (relative in listed and _is_listed(path, relative, listed[relative])):
                path.unlink()
        if Path(directory) == replaced and manifest:
            (replaced / MANIFEST).unlink(missing_ok=True)  # last: an interrupted deletion needs it again
        if not any(Path(directory).iterdir()):
            Path(directory).rmdir()


def _is_listed(path: Path, name: str, entry: OutputFile) -> bool:
    """Return whether a file is the one in the manifest; the checksum decides unless its name is that of a shard."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    return is_shard(name) or checksum_file(path).sha256 == entry.sha256
