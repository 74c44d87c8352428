# SPDX-License-Identifier: Apache-2.0
"""Output of a preparation, written to a staging directory and moved into place when complete.

When the data set is complete, a list of moves is written to its staging directory, `.preparing-<8 hexadecimal
digits>` in the output directory. Then the files and directories are moved one by one, the manifest last. If a job is
killed before the list is written, the next start removes the staging directory. If it is killed afterwards, the next
start completes the moves. Of the replaced files, only those listed in the old manifest and their indexes are
deleted.
"""

import csv
import errno
import json
import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import replacing, sync, write_atomic
from bionemo.common.lock import run_lock
from bionemo.common.redaction import redact_tree
from bionemo.config.schema.preparation import PreparationConfig
from bionemo.data.shards.ranges import INDEX
from bionemo.preparation.manifest import (
    MANIFEST,
    InputFile,
    Manifest,
    OutputFile,
    RecordCounts,
    checksum_file,
    describe_other_versions,
    library_versions,
    write_with_checksum,
)
from bionemo.preparation.urls import is_url

log = logging.getLogger(__name__)
_LOCK = ".prepare.lock"
_PREFIX = ".preparing-"
_CONTENTS = {"tree", "scratch", "replaced", "moves.json"}
_FEW_RECORDS = 10  # in a validation or test split


class StagingDirectory:
    """A directory in the output directory `target`; its unique name makes late writes of a killed job harmless.

    Attributes:
        path: the directory.
        tree: directory of the data set's files, with the same relative paths as in the output.
        scratch: directory of temporary files.
    """

    def __init__(self, target: Path, name: str | None = None) -> None:
        self.target, self.path = target, target / (name or f"{_PREFIX}{uuid.uuid4().hex[:8]}")
        self.tree, self.scratch, self._replaced = (self.path / each for each in ("tree", "scratch", "replaced"))
        self._removals = self.path / "moves.json"  # names at the top of the output that the data set does not have

    @property
    def is_complete(self) -> bool:
        """Whether the data set is complete and must be moved."""
        return self._removals.exists()

    def complete(self, replaced: Iterable[str]) -> None:
        """Declare the data set complete; it replaces the entries `replaced` of the output even if it lacks them."""
        for directory, _, _ in os.walk(self.tree):
            sync(Path(directory))
        with replacing(self._removals, self.scratch) as new:
            new.write_text(json.dumps([name for name in replaced if not (self.tree / name).exists()]))

    def finish(self) -> None:
        """Move a complete data set into place, and remove the staging directory.

        What cannot be removed is removed by the next start.
        """
        if self.is_complete:
            self._replaced.mkdir(exist_ok=True)
            self._move()
            self._keep_foreign_files()
        shutil.rmtree(self.path, ignore_errors=True)

    def _move(self) -> None:
        if not (self.tree / MANIFEST).exists():  # it moves last: all moves are done
            return
        names = [path.name for path in self.tree.iterdir() if path.name != MANIFEST]
        for name in [MANIFEST, *names, *json.loads(self._removals.read_text())]:
            if os.path.lexists(self.target / name):  # the output has no manifest until all moves are done
                os.rename(self.target / name, self._replaced / name)
        for name in [*names, MANIFEST]:
            os.rename(self.tree / name, self.target / name)
        sync(self.target)

    def _keep_foreign_files(self) -> None:
        """Move replaced files that a preparation did not write, or that were changed, to the output directory."""
        manifest = Manifest.read(self._replaced, lenient=True)
        for path in sorted(self._replaced.rglob("*"), reverse=True):  # a directory after its entries
            name = path.relative_to(self._replaced).as_posix()
            entry = manifest and manifest.files.get(INDEX.sub("", name))
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # it is not empty
                    path.rmdir()
            elif name == MANIFEST or (entry and (INDEX.search(name) or entry.size == path.lstat().st_size)):
                path.unlink()
        if any(self._replaced.iterdir()):
            kept = self.target / f"replaced-{self.path.name.removeprefix(_PREFIX)}"
            os.rename(self._replaced, kept)
            log.warning("note: replaced files that bionemo did not write, or that were changed, are now in %s", kept)


def find_interrupted(target: Path) -> list[StagingDirectory]:
    """Find the staging directories that interrupted preparations have left; anything else is the user's."""
    return [
        StagingDirectory(target, path.name)
        for path in sorted(target.glob(f"{_PREFIX}{'[0-9a-f]' * 8}"))
        if path.is_dir() and {each.name for each in path.iterdir()} <= _CONTENTS
    ]


def recover(target: Path) -> None:
    """Complete interrupted moves and remove incomplete data sets."""
    for staging in find_interrupted(target):
        if not staging.is_complete:
            log.info("starting again: an earlier preparation of %s was interrupted", target)
        staging.finish()


@dataclass
class StagedOutput:
    """A data set that is being written."""

    directory: Path  # where files are written until the data set is complete, with the same relative paths
    scratch: Path  # directory of temporary files, deleted at the end
    manifest: Manifest  # the manifest; the `write` methods add the files that they write

    def path(self, name: str) -> Path:
        """Return the path at which to write an output file; its directory exists."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def require_space(self, size: int) -> None:
        """Check, before the work starts, that the disk holds temporary files and a result of about `size` bytes each.

        Raises:
            UserError: if it does not.
        """
        if (free := shutil.disk_usage(self.directory).free) < 2 * size:
            raise UserError(
                f"{self.directory.parents[1]}: the preparation needs about {2 * size / 1e9:,.2f} GB of disk space, "
                f"and {free / 1e9:,.2f} GB are free: free disk space, or choose another output"
            )

    def add_counts(self, name: str, *directories: str) -> RecordCounts:
        """Add record counts for an input whose records are written to `directories`, or return the existing ones."""
        return self.manifest.tallies.setdefault(name, RecordCounts(list(directories)))

    def add_input(self, path: Path, display_path: str, content: OutputFile) -> None:
        """Add an input file to the manifest, with its absolute path or the URL from which it was downloaded."""
        source = display_path if is_url(display_path) else os.path.abspath(path)
        self.manifest.inputs.append(InputFile(source, content.size, content.sha256, path.stat().st_mtime_ns))

    def write(self, name: str, content: bytes, rows: int | None = None) -> None:
        """Write a small file."""
        self.manifest.files[name] = write_with_checksum(self.path(name), [content], rows)

    def write_csv(self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
        """Write a CSV file; fields are quoted only if necessary. Return the number of rows."""
        path = self.path(name)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            count = sum(map(bool, map(writer.writerow, chain([header], rows)))) - 1
        sync(path)
        self.manifest.files[name] = replace(checksum_file(path), rows=count)
        return count


def result_parameters(job: PreparationConfig, *excluded: str) -> dict[str, Any]:
    """Return the settings that determine the result, for the manifest, except the source; see `_compare_sources`."""
    names = ("_target_", "output", "force", "num_preprocess_workers", "engine", "source", *excluded)
    return {key: value for key, value in asdict(job).items() if key not in names}


@contextmanager
def stage_output(
    directory: str | Path,
    job: str,
    parameters: dict[str, Any],
    top_directories: Sequence[str],
    *,
    sources: Sequence[str] | None = None,
    force: bool = False,
) -> Iterator[StagedOutput | None]:
    """Write a data set to a directory; it appears there as a whole when the block ends without an error.

    Args:
        directory: the output; created if necessary. It may contain other files, such as the raw data.
        job: type of the preparation.
        parameters: settings that determine the result, as JSON values.
        top_directories: names of the directories that the job creates at the top of the output.
        sources: files or URLs from which an existing data set must have been made, in the order of the manifest;
            None: unknown.
        force: prepare the data again even if it is complete.

    Yields:
        The staged output; None if the directory already contains this data set.

    Raises:
        UserError: if the directory contains another data set or cannot be written, or the disk is full.
    """
    target = Path(directory)
    parameters = redact_tree(json.loads(json.dumps(parameters)))
    if not force and not find_interrupted(target) and _is_complete(target, job, parameters, sources):
        yield None
        return
    with translate_os_errors(target), run_lock(target, _LOCK, wait=True):
        recover(target)
        if not force and _is_complete(target, job, parameters, sources):  # prepared by another process meanwhile
            yield None
            return
        replaced = _find_replaced(target, top_directories, force)
        staging = StagingDirectory(target)
        output = StagedOutput(
            staging.tree, staging.scratch, Manifest(job, parameters, versions=library_versions(job, parameters))
        )
        try:
            staging.tree.mkdir(parents=True)
            staging.scratch.mkdir()
            yield output
            for name, counts in output.manifest.tallies.items():
                for problem in counts.inconsistencies():
                    raise AssertionError(f"{name}: {problem}")
            write_atomic(staging.tree / MANIFEST, output.manifest.to_json())
            staging.complete(replaced)
        finally:
            staging.finish()
    _log_summary(target, output.manifest)


def _log_summary(directory: Path, manifest: Manifest) -> None:
    """Log the record counts of all inputs and splits, and a warning for very small validation or test splits."""
    for name, counts in manifest.tallies.items():
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in counts.dropped.items() if count)
        changed = "".join(f", {count:,} {change}" for change, count in counts.changed.items() if count)
        directories = " and ".join(f"{each}/" for each in counts.into)
        log.info(
            "%s: %s records read, %s written to %s%s%s",
            name, f"{counts.read:,}", f"{counts.written:,}", directories, dropped, changed,
        )  # fmt: skip
    splits: Counter[str] = Counter()
    for name, entry in manifest.files.items():
        if entry.rows is not None and "/" in name:  # a shard
            splits[name.rpartition("/")[0]] += entry.rows
    names = sorted(splits, key=lambda name: (name.endswith("test"), name.endswith("val"), name))
    records = ", ".join(f"{name} {splits[name]:,}" for name in names)
    log.info("prepared: %s: %s records", directory, records or "no")
    few: list[str] = []  # splits that are too small for metrics, unless the user requested this number
    for split in ("val", "test"):
        requested, found = manifest.parameters.get(f"{split}_size", 0), splits[split]
        if found < _FEW_RECORDS and (found < requested or 0 < requested < 1):
            few.append(f"{split} has {found}")
    if few:
        log.warning(
            "note: %s of %s records, too few for reliable metrics: set larger val_size and test_size%s",
            " and ".join(few), f"{splits.total():,}",
            " in proportion to train_size, and force=True" if "train_size" in manifest.parameters else "",
        )  # fmt: skip


def _is_complete(target: Path, job: str, parameters: dict[str, Any], sources: Sequence[str] | None) -> bool:
    """Return whether the directory contains this data set, with all its files."""
    if (manifest := Manifest.read(target)) is None:
        return False
    if manifest.job != job:
        raise UserError(f"{target} contains {manifest.job} data: choose another output, or force=True to replace it")
    for key in sorted({*parameters, *manifest.parameters}):
        old, new = manifest.parameters.get(key), parameters.get(key)
        if old != new:
            raise UserError(
                f"{target} was prepared with {key}={old}, not {new}: choose another output, or set force=True"
            )
    if sources is not None:
        _compare_sources(target, manifest.inputs, sources)
    for path, entry in ((target / name, entry) for name, entry in manifest.files.items()):
        if not path.is_file() or path.stat().st_size != entry.size:
            raise UserError(f"{path} has changed since it was prepared: prepare it again with force=True")
    log.info("%s is prepared already; force=True prepares it again", target)
    if note := describe_other_versions(manifest):
        log.warning("note: %s was %s", target, note)
    return True


def _compare_sources(target: Path, inputs: Sequence[InputFile], sources: Sequence[str]) -> None:
    """Compare the inputs of an existing data set with the sources of this job.

    URLs must be equal. Files, which may have moved, must have equal names and, where they can be read, equal content.
    """
    remedy = "choose another output, or set force=True"
    if len(inputs) != len(sources):
        raise UserError(f"{target} was prepared from {len(inputs):,} files, not {len(sources):,}: {remedy}")
    for entry, source in zip(inputs, sources, strict=True):
        names = [Path(name).name.removesuffix(".gz") for name in (entry.source, source)]
        if names[0] != names[1] or (is_url(source) and source != entry.source):
            raise UserError(f"{target} was prepared from {entry.source}, not {source}: {remedy}")
        if not is_url(source) and Path(source).is_file() and not entry.is_unchanged(Path(source)):
            raise UserError(f"{source} has changed since {target} was prepared from it, or is another file: {remedy}")


def _find_replaced(target: Path, top_directories: Sequence[str], force: bool) -> set[str]:
    """Return the names of the directories that the new data set replaces; raw files are not among them."""
    existing = Manifest.read(target, lenient=force)
    owned = {name.partition("/")[0] for name in existing.files if "/" in name} if existing else set()
    for name in top_directories:
        if os.path.lexists(target / name) and name not in owned and not force:
            raise UserError(
                f"{target / name} exists and was not made by this preparation: move it away, choose another output, "
                "or force=True to replace it"
            )
    return owned.union(top_directories)


@contextmanager
def translate_os_errors(
    target: Path, when_full: str = "no output was written: free disk space, or choose another output"
) -> Iterator[None]:
    """Translate an OSError about the output into a UserError; `when_full` ends the message for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{target}: no space left on the disk; {when_full}") from error
        path = error.filename or target
        reason = error.strerror or " ".join(str(error).split())
        raise UserError(f"{path} cannot be written or read ({reason}): check path and permissions") from error
