# SPDX-License-Identifier: Apache-2.0
"""The directory in which a data set is written before it takes its place, all at once.

A stage, `.preparing-<8 hexadecimal digits>` in the output directory, is marked as created by this project. When the
data set is complete, a list of what has to move is written into it; then its parts move one by one, the manifest last.
A job killed before the list leaves a stage that the next start removes; one killed after it is finished by the next
start. Somebody else may have written to the output directory: only marked stages are touched, names must be those that
a preparation writes, and of what is replaced only files that its manifest lists are deleted.
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
from bionemo.preparation.checksums import OutputFile, measure
from bionemo.preparation.manifest import Manifest
from bionemo.preparation.names import DIRECTORIES, MANIFEST, STAGE_PREFIX, is_shard, is_top_level

log = logging.getLogger(__name__)
_NAME = re.compile(re.escape(STAGE_PREFIX) + "[0-9a-f]{8}")
_MOVES, _REPLACED, _KIND = "moves.json", "replaced", "preparation"
_LARGEST = 1 << 20  # bytes of a list of moves


@dataclass(frozen=True)
class Stage:
    """A stage of an output directory.

    Attributes:
        target: the output directory.
        path: of the stage.
    """

    target: Path
    path: Path

    @classmethod
    def create(cls, target: Path) -> "Stage":
        """Make a new one; every job has its own, so late writes of a killed job do no harm."""
        stage = cls(target, target / f"{STAGE_PREFIX}{uuid.uuid4().hex[:8]}")
        try:
            create_owned(stage.path, _KIND)
            stage.tree.mkdir()
            stage.scratch.mkdir()
        except BaseException:
            shutil.rmtree(stage.path, ignore_errors=True)
            raise
        return stage

    @property
    def tree(self) -> Path:
        """Where the files of the data set are written, at the same relative paths as in the output."""
        return self.path / "tree"

    @property
    def scratch(self) -> Path:
        """Where intermediate files are written."""
        return self.path / "scratch"

    @property
    def is_complete(self) -> bool:
        """Whether the data set is complete and has to be moved."""
        return os.path.lexists(self.path / _MOVES)

    def commit(self, former: Iterable[str]) -> None:
        """Move everything to its place.

        Args:
            former: names at the top of the output that go if the data set has no such part.
        """
        names = {*(path.name for path in self.tree.iterdir()), *former}
        for directory, _, _ in os.walk(self.tree):
            sync(Path(directory))
        write_atomic(self.path / _MOVES, json.dumps({name: (self.tree / name).exists() for name in sorted(names)}))
        self.move()

    def move(self) -> None:
        """Move everything that is not moved yet to its place, and remove the stage.

        Raises:
            UserError: when the stage is not one that an interrupted preparation has left; nothing has been moved.
        """
        moves = self._moves()
        if (self.tree / MANIFEST).exists():  # it moves last: without it everything has been moved
            (self.path / _REPLACED).mkdir(exist_ok=True)
            self._displace(MANIFEST)  # from here to the end the output has none
            for name, is_new in sorted(moves.items()):
                if name == MANIFEST or (is_new and not (self.tree / name).exists()):
                    continue  # the latter moved before the interruption
                self._displace(name)
                if is_new:
                    os.rename(self.tree / name, self.target / name)
            os.rename(self.tree / MANIFEST, self.target / MANIFEST)
            sync(self.target)
        self.remove()

    def _displace(self, name: str) -> None:
        if os.path.lexists(self.target / name):
            os.rename(self.target / name, self.path / _REPLACED / name)

    def _moves(self) -> dict[str, bool]:
        """Read the list of moves, and compare the stage with it and with its manifest.

        Returns:
            For each name at the top of the output, whether the new data set has such a part.
        """
        try:
            moves = load_json(self.path / _MOVES, _LARGEST, follow=False)
            if not isinstance(moves, dict) or not all(map(_is_move, moves.items())):
                raise ValueError(f"{_MOVES} names something that a preparation does not write")
            for path in (self.tree, self.path / _REPLACED):
                if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                    raise ValueError(f"{path.name} is not a directory")
            if (self.tree / MANIFEST).exists():
                _check_tree(self.tree)
        except ValueError as error:
            raise UserError(
                f"{self.path} is not what an interrupted preparation leaves ({error}): remove this directory, then "
                "start again"
            ) from error
        return moves

    def remove(self) -> None:
        """Delete the stage; files that were replaced but not written by a preparation are kept beside it."""
        replaced = self.path / _REPLACED
        if replaced.is_dir() and not replaced.is_symlink():
            kept = self.target / f"replaced-{self.path.name.removeprefix(STAGE_PREFIX)}"
            _delete_listed(replaced)
            if replaced.exists():
                os.rename(replaced, kept)
                sync(self.target)
                log.warning("note: what was replaced and not written by bionemo, or changed since, is now in %s", kept)
        for path in self.path.iterdir():
            if path.name in (MARKER, _MOVES):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        (self.path / _MOVES).unlink(missing_ok=True)
        if [path.name for path in self.path.iterdir()] == [MARKER]:  # else the next start removes it
            (self.path / MARKER).unlink()
            with suppress(OSError):
                self.path.rmdir()


def is_interrupted(target: Path) -> bool:
    """Whether an earlier preparation left something that `recover` finishes or removes."""
    return bool(_stages(target)) or any(map(is_unmarked, _named(target)))


def _stages(target: Path) -> list[Stage]:
    """Find the stages of an output directory that this project created."""
    return [Stage(target, path) for path in _named(target) if identity_of(path, _KIND) is not None]


def recover(target: Path) -> None:
    """Finish what was complete when it was interrupted, and remove what was not.

    Raises:
        UserError: when a stage is not one that an interrupted preparation has left.
    """
    for stage in _stages(target):
        if stage.is_complete:
            stage.move()
    for stage in _stages(target):
        log.info("starting again: an earlier preparation of %s was interrupted", target)
        stage.remove()
    for path in _named(target):
        if is_unmarked(path):
            for unfinished in path.iterdir():
                unfinished.unlink()
            path.rmdir()
        elif identity_of(path, _KIND) is None:
            log.warning("note: %s was not created by bionemo and is left as it is", path)


def _named(target: Path) -> Iterator[Path]:
    for path in sorted(target.glob(f"{STAGE_PREFIX}*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _is_move(move: tuple[str, object]) -> bool:
    name, is_new = move
    return isinstance(is_new, bool) and (name in DIRECTORIES or name == MANIFEST or (is_new and is_top_level(name)))


def _check_tree(tree: Path) -> None:
    """See that all files of a stage are regular and listed in its manifest, with their sizes.

    Raises:
        ValueError: for one that is not, and for an invalid manifest.
    """
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


def _delete_listed(replaced: Path) -> None:
    """Delete a data set that was replaced: the files that its manifest lists, then directories that are empty."""
    try:
        manifest = Manifest.read(replaced)
    except UserError:
        manifest = None
    for directory, _, files in os.walk(replaced, topdown=False):
        for name in files:
            path = Path(directory, name)
            relative = path.relative_to(replaced).as_posix()
            if manifest and relative in manifest.files and _is_listed(path, relative, manifest.files[relative]):
                path.unlink()
        if Path(directory) == replaced and manifest:
            (replaced / MANIFEST).unlink(missing_ok=True)  # last: an interrupted deletion needs it again
        if not any(Path(directory).iterdir()):
            Path(directory).rmdir()


def _is_listed(path: Path, name: str, entry: OutputFile) -> bool:
    """Whether a file is the one that a manifest lists; names that are not peculiar to preparations need a checksum."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    return is_shard(name) or measure(path).sha256 == entry.sha256
