# SPDX-License-Identifier: Apache-2.0
"""A directory that becomes what it shall be at the end, all at once.

Everything is written below a stage, `.preparing-*` in the output directory. When it is complete, a list of what has to
move is put there, the parts move to their places one by one, the manifest last. A job killed before the list leaves
nothing but its stage, which the next start removes; one killed after it is finished by the next start.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bionemo.common.redaction import redact_tree
from bionemo.errors import UserError
from bionemo.preparation.manifest import NAME, InputFile, Manifest, OutputFile, Tally

log = logging.getLogger(__name__)
_STAGE, _LOCK, _MOVES = ".preparing-", ".prepare.lock", "moves.json"


@dataclass
class Draft:
    """A data set in the making.

    Attributes:
        directory: where its files are written until they are complete, at the same relative paths.
        scratch: for intermediate files; gone at the end.
        manifest: filled in on the way; files written through the draft enter themselves.
    """

    directory: Path
    scratch: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Where to write a file of the output; its directory exists."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def tally(self, name: str, *into: str) -> Tally:
        """Open the books of an input."""
        return self.manifest.tallies.setdefault(name, Tally(list(into)))

    def add_input(self, source: str, size: int, sha256: str) -> None:
        """Note a file that was read."""
        self.manifest.inputs.append(InputFile(source, size, sha256))

    def write(self, name: str, content: bytes, rows: int | None = None) -> None:
        """Write a small file whole."""
        path = self.path(name)
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.manifest.files[name] = OutputFile(len(content), hashlib.sha256(content).hexdigest(), rows)

    def write_csv(self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
        """Write a CSV file that fits into memory; fields are quoted only where they must be.

        Returns:
            How many rows there were.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        count = 0
        for row in rows:
            writer.writerow(row)
            count += 1
        self.write(name, text.getvalue().encode(), count)
        return count


@contextmanager
def draft(
    directory: str | Path,
    job: str,
    parameters: dict[str, Any],
    places: Sequence[str],
    *,
    sources: Sequence[str | Path] = (),
    force: bool = False,
) -> Iterator[Draft | None]:
    """Prepare a data set in a directory; on leaving the block without an error it is complete.

    Args:
        directory: of the output; made if it is not there, and may hold other things, such as the raw files.
        job: the kind of preparation.
        parameters: what decides the result, as plain JSON values.
        places: names at the top of the directory that the job will make.
        sources: files or URLs that a finished data set must have been made from.
        force: do it again even if it is complete.

    Yields:
        The draft; None when the directory holds this very data set already.

    Raises:
        UserError: when the directory holds another data set, cannot be written, or is full.
    """
    target = Path(directory)
    parameters = redact_tree(json.loads(json.dumps(parameters)))
    if not force and not _stages(target) and _complete(target, job, parameters, sources):
        yield None
        return
    with told(target), sole_preparer(target):
        _recover(target)
        if not force and _complete(target, job, parameters, sources):  # another process has prepared it meanwhile
            yield None
            return
        former = _former(target, places, force)
        stage = target / f"{_STAGE}{uuid.uuid4().hex[:8]}"  # of its own: a killed job's last writes go astray
        made = Draft(stage / "tree", stage / "scratch", Manifest(job, parameters))
        made.directory.mkdir(parents=True)
        made.scratch.mkdir()
        try:
            yield made
            _balance(made.manifest)
            made.directory.joinpath(NAME).write_text(made.manifest.text())
            sync(made.directory / NAME)
            shutil.rmtree(made.scratch)
            _commit(target, stage, former)
        finally:
            if not (stage / _MOVES).exists():  # otherwise all is there, and the next start moves it
                shutil.rmtree(stage, ignore_errors=True)
    summary(target, made.manifest)


def summary(directory: Path, manifest: Manifest) -> None:
    """Say what became of every record."""
    for name, tally in manifest.tallies.items():
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in tally.dropped.items() if count)
        changed = "".join(f", {count:,} {what}" for what, count in tally.changed.items() if count)
        places = " and ".join(f"{place}/" for place in tally.into)
        log.info("%s: %s records read, %s written to %s%s%s", name, f"{tally.read:,}", f"{tally.written:,}", places,
                 dropped, changed)  # fmt: skip
    log.info("prepared: %s", directory)


def _complete(target: Path, job: str, parameters: dict[str, Any], sources: Sequence[str | Path]) -> bool:
    """Whether the directory holds this data set, whole.

    Raises:
        UserError: when it holds another one.
    """
    if (manifest := Manifest.read(target)) is None:
        return False
    if manifest.job != job:
        raise UserError(f"{target} holds {manifest.job} data: choose another output, or force=True to replace it")
    for key in sorted({*parameters, *manifest.parameters}):
        was, now = manifest.parameters.get(key), parameters.get(key)
        if was != now:
            raise UserError(
                f"{target} was prepared with {key}={was}, not {now}: choose another output, or set force=True"
            )
    _same_sources(target, manifest, sources)
    missing = [name for name, entry in manifest.files.items() if _size(target / name) != entry.size]
    if missing:
        raise UserError(f"{target / missing[0]} is not as it was prepared: prepare it again with force=True")
    log.info("%s is prepared already; force=True would do it again", target)
    return True


def _same_sources(target: Path, manifest: Manifest, sources: Sequence[str | Path]) -> None:
    """Compare by name, as a file may have moved, and what is on this machine by size."""
    known = {Path(entry.source).name: entry.size for entry in manifest.inputs}
    for source in sources:
        name, size = Path(source).name, _size(Path(source))
        if name not in known:
            read = ", ".join(known)
            raise UserError(f"{target} was prepared from {read}, not {name}: choose another output, or set force=True")
        if size not in (-1, known[name]):
            raise UserError(f"{source} has changed since {target} was prepared from it: prepare it with force=True")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _former(target: Path, places: Sequence[str], force: bool) -> set[str]:
    """Names of the directories that the new data set takes the place of; raw files are not among them."""
    try:
        found = Manifest.read(target)
    except UserError:
        if not force:
            raise
        found = None
    ours = {name.partition("/")[0] for name in found.files if "/" in name} if found else set()
    for place in places:
        if (target / place).exists() and place not in ours and not force:
            raise UserError(
                f"{target / place} exists and was not made by this preparation: move it away, choose another output, "
                "or force=True to replace it"
            )
    return ours.union(places)


def _balance(manifest: Manifest) -> None:
    for name, tally in manifest.tallies.items():
        for problem in tally.problems:
            raise AssertionError(f"{name}: {problem}")


def _commit(target: Path, stage: Path, former: set[str]) -> None:
    """Move what was there out of the way and everything new to its place, the manifest last."""
    tree = stage / "tree"
    names = sorted({path.name for path in tree.iterdir()} | former, key=lambda name: (name == NAME, name))
    fresh = {name: (tree / name).exists() for name in names}
    for directory, _, _ in os.walk(tree):
        sync(Path(directory))
    moves = stage / _MOVES
    with moves.with_suffix(".tmp").open("w") as file:
        json.dump(fresh, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(moves.with_suffix(".tmp"), moves)
    sync(stage)
    _move(target, stage)


def _move(target: Path, stage: Path) -> None:
    replaced = stage / "replaced"
    replaced.mkdir(exist_ok=True)
    fresh: dict[str, bool] = json.loads((stage / _MOVES).read_text())
    if (stage / "tree" / NAME).exists():  # between here and the end the directory is not a whole data set
        (target / NAME).unlink(missing_ok=True)
    for name, is_fresh in fresh.items():
        if is_fresh and not (stage / "tree" / name).exists():
            continue  # moved before the interruption
        if (target / name).exists():
            os.rename(target / name, replaced / name)
        if is_fresh:
            os.rename(stage / "tree" / name, target / name)
    sync(target)
    (stage / _MOVES).unlink()
    shutil.rmtree(stage)


def _recover(target: Path) -> None:
    """Finish what was complete when it was interrupted, and remove what was not."""
    for moves in _stages(target, _MOVES):
        _move(target, moves.parent)
    for stage in _stages(target):
        log.info("starting again: an earlier preparation of %s was interrupted", target)
        shutil.rmtree(stage, ignore_errors=True)


def _stages(target: Path, *below: str) -> list[Path]:
    return sorted(target.glob("/".join((f"{_STAGE}*", *below))))


@contextmanager
def sole_preparer(target: Path, lock: str = _LOCK) -> Iterator[None]:
    """Let one process at a time hold a lock file of a directory, which goes again if nothing is in it at the end."""
    handle = _lock(target, lock)
    try:
        yield
    finally:
        (target / lock).unlink(missing_ok=True)
        with suppress(OSError):
            target.rmdir()
        os.close(handle)


def _lock(target: Path, name: str) -> int:
    """Hold the lock file: the open one must be the one that has the name, as its last holder has removed his."""
    path, waiting = target / name, False
    while True:
        target.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # its last holder has removed the empty directory in between
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    log.info("another process is preparing %s: waiting for it", target)
                waiting = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            return handle  # a file system without locks: whoever starts two jobs there must see to it himself
        os.close(handle)


@contextmanager
def told(target: Path) -> Iterator[None]:
    """Turn what the system says about the output into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{target}: no space left on the disk; nothing of it was kept: free some, or choose another output"
            ) from error
        where = error.filename or target
        raise UserError(f"{where} cannot be written or read ({error.strerror}): check path and permissions") from error


def sync(path: Path) -> None:
    """Put a file, or the list of names in a directory, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
