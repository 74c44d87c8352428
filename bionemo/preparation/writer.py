# SPDX-License-Identifier: Apache-2.0
"""An output directory holds a whole data set or none: files are written to a stage, and move when all are complete."""

import csv
import errno
import hashlib
import io
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.lock import run_lock
from bionemo.common.redaction import redact_tree
from bionemo.preparation.addresses import is_url
from bionemo.preparation.checksums import InputFile, OutputFile
from bionemo.preparation.manifest import Manifest, Tally
from bionemo.preparation.names import MANIFEST, is_output, is_shard
from bionemo.preparation.staged_output import Stage, is_interrupted, recover

log = logging.getLogger(__name__)
_LOCK = ".prepare.lock"
_FEW = 10  # records of a held-out split


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
        assert is_output(name), name  # a manifest with another name is refused when it is read
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def tally(self, name: str, *into: str) -> Tally:
        """Open the books of an input."""
        return self.manifest.tallies.setdefault(name, Tally(list(into)))

    def add_input(self, source: str, path: Path, found: OutputFile) -> None:
        """Note a file that was read.

        Args:
            source: absolute path, or URL that it was downloaded from.
            path: where it lies.
            found: its size and checksum.
        """
        self.manifest.inputs.append(InputFile.of(source, path, found))

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
    sources: Sequence[str] | None = None,
    force: bool = False,
) -> Iterator[Draft | None]:
    """Prepare a data set in a directory; on leaving the block without an error it is complete.

    Args:
        directory: of the output; made if it is not there, and may hold other things, such as the raw files.
        job: the kind of preparation.
        parameters: settings that determine the result, as plain JSON values.
        places: names of directories at the top of the output that the job will make.
        sources: files or URLs that a finished data set must have been made from, in the order in which they are
            noted; None: not known.
        force: do it again even if it is complete.

    Yields:
        The draft; None when the directory holds this very data set already.

    Raises:
        UserError: when the directory holds another data set, cannot be written, or is full.
    """
    target = Path(directory)
    parameters = redact_tree(json.loads(json.dumps(parameters)))
    if not force and not is_interrupted(target) and _is_complete(target, job, parameters, sources):
        yield None
        return
    with told(target), sole_preparer(target):
        recover(target)
        if not force and _is_complete(target, job, parameters, sources):  # another process has prepared it meanwhile
            yield None
            return
        former = _former(target, places, force)
        stage = Stage.create(target)
        made = Draft(stage.tree, stage.scratch, Manifest(job, parameters))
        try:
            yield made
            _balance(made.manifest)
            write_atomic(stage.tree / MANIFEST, made.manifest.text())
            shutil.rmtree(stage.scratch)
            stage.commit(former)
        finally:
            if not stage.is_complete:  # otherwise the next start moves it
                with suppress(OSError):  # nor may it hide the error that has led here
                    stage.remove()
    summary(target, made.manifest)


def summary(directory: Path, manifest: Manifest) -> None:
    """Say what became of every record, and how many there are in each split."""
    for name, tally in manifest.tallies.items():
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in tally.dropped.items() if count)
        changed = "".join(f", {count:,} {what}" for what, count in tally.changed.items() if count)
        places = " and ".join(f"{place}/" for place in tally.into)
        log.info("%s: %s records read, %s written to %s%s%s", name, f"{tally.read:,}", f"{tally.written:,}", places,
                 dropped, changed)  # fmt: skip
    splits = _splits(manifest)
    counts = ", ".join(f"{split} {count:,}" for split, count in splits.items())
    log.info("prepared: %s: %s records", directory, counts or "no")
    _note_small_splits(manifest.parameters, splits)


def _splits(manifest: Manifest) -> dict[str, int]:
    """Records of each directory of shards, training first."""
    counts: Counter[str] = Counter()
    for name, entry in manifest.files.items():
        if is_shard(name) and entry.rows is not None:
            counts[name.rpartition("/")[0]] += entry.rows
    return dict(sorted(counts.items(), key=lambda item: [item[0].endswith(split) for split in ("test", "val")]))


def _note_small_splits(parameters: dict[str, Any], splits: dict[str, int]) -> None:
    """Warn of a held-out split with so few records that metrics mean little, unless this number was asked for."""
    few: list[str] = []
    for split in ("val", "test"):
        wanted, found = parameters.get(f"{split}_size", 0), splits.get(split, 0)
        if found < _FEW and (found < wanted or 0 < wanted < 1):
            few.append(f"{split} has {found}")
    if few:
        total = sum(splits.values())
        held = max(1, total // 10)
        advice = "set larger val_size and test_size"
        if "train_size" in parameters:  # records of each shard: only their proportions count for a small data set
            advice = (
                f"set train_size={max(1, total - 2 * held)} val_size={held} test_size={held}, or other proportions"
            )
        log.warning("note: %s of %s records, too few to measure a model with: %s", " and ".join(few), f"{total:,}",
                    advice)  # fmt: skip


def _is_complete(target: Path, job: str, parameters: dict[str, Any], sources: Sequence[str] | None) -> bool:
    """Whether the directory holds this data set, whole.

    Raises:
        UserError: when it holds another one.
    """
    if (manifest := Manifest.read(target)) is None:
        return False
    if manifest.job != job:
        raise UserError(
            f"{target} holds {_shown(manifest.job)} data: choose another output, or force=True to replace it"
        )
    for key in sorted({*parameters, *manifest.parameters}):
        was, now = manifest.parameters.get(key), parameters.get(key)
        if was != now:
            raise UserError(
                f"{target} was prepared with {_shown(key)}={_shown(was)}, not {_shown(now)}: choose another output, "
                "or set force=True"
            )
    if sources is not None:
        _compare_sources(target, manifest.inputs, sources)
    missing = [name for name, entry in manifest.files.items() if _size(target / name) != entry.size]
    if missing:
        raise UserError(f"{target / missing[0]} is not as it was prepared: prepare it again with force=True")
    log.info("%s is prepared already; force=True would do it again", target)
    return True


def _shown(value: object) -> str:
    """Render something that a manifest holds, which may be anything, for a message."""
    text = str(value)
    return (text if text.isprintable() else ascii(text))[:80]


def _compare_sources(target: Path, inputs: Sequence[InputFile], sources: Sequence[str]) -> None:
    """Compare the files that a data set was made from with those that it shall be made from.

    URLs must be the same; files must have the same name, as a file may have moved, and, where they can be read, the
    same content.

    Raises:
        UserError: when they differ.
    """
    way_out = "choose another output, or set force=True"
    if len(inputs) != len(sources):
        raise UserError(f"{target} was prepared from {len(inputs):,} files, not {len(sources):,}: {way_out}")
    for entry, source in zip(inputs, sources, strict=True):
        if source == entry.source and is_url(source):
            continue
        names = [Path(name).name.removesuffix(".gz") for name in (entry.source, source)]
        if is_url(source) or names[0] != names[1]:
            before, now = (entry.source, source) if names[0] == names[1] else map(_base, (entry.source, source))
            raise UserError(f"{target} was prepared from {_shown(before)}, not {now}: {way_out}")
        path = Path(source)
        if path.is_file() and not entry.is_unchanged(path):
            raise UserError(f"{source} has changed since {target} was prepared from it, or is another file: {way_out}")


def _base(source: str) -> str:
    return Path(source).name


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
        if os.path.lexists(target / place) and place not in ours and not force:
            raise UserError(
                f"{target / place} exists and was not made by this preparation: move it away, choose another output, "
                "or force=True to replace it"
            )
    return ours.union(places)


def _balance(manifest: Manifest) -> None:
    for name, tally in manifest.tallies.items():
        for problem in tally.problems:
            raise AssertionError(f"{name}: {problem}")


@contextmanager
def sole_preparer(target: Path, lock: str = _LOCK) -> Iterator[None]:
    """Let one process at a time hold the lock of a directory; the others wait for it."""
    with run_lock(target, lock, wait=True):
        yield


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
        reason = error.strerror or " ".join(str(error).split())
        raise UserError(f"{where} cannot be written or read ({reason}): check path and permissions") from error
