# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of an output directory: files are staged, then moved into place when the data set is complete.

When the data set is complete, a list of moves is written to its staging directory, `.preparing-<8 hexadecimal
digits>` in the output directory. Then the files and directories are moved one by one, the manifest last. If a job is
killed before the list is written, the next start removes the staging directory. If it is killed afterwards, the next
start completes the moves. Of the replaced files, only those listed in the old manifest and their indexes are
deleted.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.files import sync, write_atomic
from bionemo.data.shards.ranges import INDEX
from bionemo.preparation.manifest import MANIFEST, Manifest

log = logging.getLogger(__name__)
_PREFIX = ".preparing-"
_CONTENTS = re.compile(r"tree|scratch|replaced|\.?moves\.json.*")  # the last also while it is written


@dataclass(frozen=True)
class StagingDirectory:
    """The staging directory `path` of the output directory `target`."""

    target: Path
    path: Path

    @classmethod
    def create(cls, target: Path) -> "StagingDirectory":
        """Create a directory with a unique name, so that late writes of a killed job do no harm."""
        staging = cls(target, target / f"{_PREFIX}{uuid.uuid4().hex[:8]}")
        try:
            staging.tree.mkdir(parents=True)
            staging.scratch.mkdir()
        except OSError:
            staging.remove()
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
    def _replaced(self) -> Path:
        return self.path / "replaced"

    @property
    def _removals(self) -> Path:
        """File with the names at the top of the output that the data set does not have."""
        return self.path / "moves.json"

    @property
    def is_complete(self) -> bool:
        """Whether the data set is complete and must be moved."""
        return self._removals.exists()

    def commit(self, replaced: Iterable[str]) -> None:
        """Move all files into place, and remove the names `replaced` at the top of the output in any case."""
        for directory, _, _ in os.walk(self.tree):
            sync(Path(directory))
        write_atomic(self._removals, json.dumps([name for name in replaced if not (self.tree / name).exists()]))
        self.move()

    def move(self) -> None:
        """Move all files that have not been moved yet into place, and remove the staging directory."""
        if (self.tree / MANIFEST).exists():  # it moves last: if it is gone, all moves are done
            self._replaced.mkdir(exist_ok=True)
            self._displace(MANIFEST)  # the output has no manifest until all moves are done
            for name in json.loads(self._removals.read_text()):
                self._displace(name)
            for path in [path for path in self.tree.iterdir() if path.name != MANIFEST]:
                self._displace(path.name)
                os.rename(path, self.target / path.name)
            os.rename(self.tree / MANIFEST, self.target / MANIFEST)
            sync(self.target)
        self._keep_foreign_files()
        self.remove()

    def remove(self) -> None:
        """Delete the staging directory; what cannot be deleted is deleted by the next start."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _displace(self, name: str) -> None:
        if os.path.lexists(self.target / name):
            os.rename(self.target / name, self._replaced / name)

    def _keep_foreign_files(self) -> None:
        """Move replaced files that a preparation did not write, or that were changed, to the output directory."""
        try:
            manifest = Manifest.read(self._replaced)
        except UserError:
            manifest = None
        for directory, _, names in os.walk(self._replaced, topdown=False):
            for name in names:
                path = Path(directory, name)
                entry = manifest and manifest.files.get(INDEX.sub("", path.relative_to(self._replaced).as_posix()))
                is_ours = entry and (INDEX.search(name) or entry.size == path.lstat().st_size)
                if is_ours or path == self._replaced / MANIFEST:
                    path.unlink()
            if not any(Path(directory).iterdir()):
                Path(directory).rmdir()
        if self._replaced.exists():
            kept = self.target / f"replaced-{self.path.name.removeprefix(_PREFIX)}"
            os.rename(self._replaced, kept)
            log.warning("note: replaced files that bionemo did not write, or that were changed, are now in %s", kept)


def find_interrupted(target: Path) -> list[StagingDirectory]:
    """Find the staging directories that interrupted preparations have left; anything else is the user's."""
    return [StagingDirectory(target, path) for path in sorted(target.glob(f"{_PREFIX}*")) if _is_ours(path)]


def _is_ours(path: Path) -> bool:
    if not re.fullmatch(r"[0-9a-f]{8}", path.name.removeprefix(_PREFIX)) or path.is_symlink() or not path.is_dir():
        return False
    return all(_CONTENTS.fullmatch(each.name) for each in path.iterdir())


def recover(target: Path) -> None:
    """Complete interrupted moves and remove incomplete data sets."""
    for staging in find_interrupted(target):
        if staging.is_complete:
            staging.move()
        else:
            log.info("starting again: an earlier preparation of %s was interrupted", target)
            staging.remove()
