# SPDX-License-Identifier: Apache-2.0
"""The manifest of a prepared data set: settings, input files, output files, their checksums, and record counts."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.common.progress import progress
from bionemo.common.regular import load_json
from bionemo.preparation.urls import is_url

MANIFEST = "manifest.json"
_READ_BYTES = 4 << 20
_FORMAT, _VERSION = "bionemo-prepared", 1
_MAX_BYTES = 64 << 20
# NumPy shuffles the records of some data sets, and its generators may change between releases.
_LIBRARIES = {
    "zinc": ("rdkit",), "uspto": ("rdkit",), "moleculenet": ("rdkit", "numpy"), "sequences": ("numpy",),
}  # fmt: skip


@dataclass(frozen=True)
class OutputFile:
    """Size and checksum of a file."""

    size: int
    sha256: str
    rows: int | None = None  # number of records of a CSV file with one header line, or of a parquet file


@dataclass(frozen=True)
class InputFile:
    """Origin, size and checksum of an input file."""

    source: str  # path or URL
    size: int  # number of bytes
    sha256: str  # checksum of all bytes
    mtime_ns: int | None = None  # modification time; None in manifests of earlier versions

    def is_unchanged(self, path: Path) -> bool:
        """Return whether a file is this one; it is read if its size is equal and its modification time is not."""
        found = path.stat()
        if found.st_size != self.size or found.st_mtime_ns == self.mtime_ns:
            return found.st_size == self.size
        with progress(f"comparing {path.name} with the file that was prepared", self.size) as advance:
            return checksum_file(path, advance).sha256 == self.sha256


def checksum_file(path: Path, advance: Callable[[int], object] = lambda count: None) -> OutputFile:
    """Compute size and checksum of a file.

    Raises:
        OSError: if it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
            advance(len(block))
    return OutputFile(size, digest.hexdigest())


def write_with_checksum(
    path: Path, parts: Iterable[bytes | memoryview], rows: int | None = None, flush: bool = True
) -> OutputFile:
    """Write a file and compute its checksum; with `flush`, wait until it is on disk."""
    digest, size = hashlib.sha256(), 0
    with replacing(path, durable=flush) as new, new.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return OutputFile(size, digest.hexdigest(), rows)


@dataclass
class RecordCounts:
    """Counts for one input: every record that is read is written to a directory in `into`, or dropped for a reason."""

    into: list[str]  # directories relative to the output
    read: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # number of records by reason
    letters_read: int | None = None  # letters of sequences without line ends; None if they are not counted
    letters_written: int | None = None
    letters_dropped: int = 0
    changed: dict[str, int] = field(default_factory=dict)  # number of records by the kind of change

    def drop(self, reason: str, count: int = 1) -> None:
        """Count dropped records."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def inconsistencies(self) -> Iterator[str]:
        """Describe the counts that do not add up."""
        dropped = sum(self.dropped.values())
        if self.read != self.written + dropped:
            yield f"{self.read:,} records read, {self.written:,} written, {dropped:,} dropped"
        letters_written = self.letters_written or 0
        if self.letters_read not in (None, letters_written + self.letters_dropped):
            yield (
                f"{self.letters_read:,} letters read, {letters_written:,} written, {self.letters_dropped:,} dropped"
            )


@dataclass
class Manifest:
    """Content of `manifest.json`."""

    job: str  # type of the preparation
    parameters: dict[str, Any]  # settings that determine the result, as JSON values
    # the input files, in the order in which the result depends on them
    inputs: list[InputFile] = field(default_factory=list)
    tallies: dict[str, RecordCounts] = field(default_factory=dict)  # record counts by a name for each input
    # the output files by path relative to the output, with `/`
    files: dict[str, OutputFile] = field(default_factory=dict)
    # versions of the libraries on which the content depends
    versions: dict[str, str] = field(default_factory=dict)
    # of `split=similarity`: clusters, sizes, identity of held-out and training sequences; otherwise {}
    similarity: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of `manifest.json`."""
        content = {key: value for key, value in asdict(self).items() if value or key != "similarity"}
        return json.dumps({"format": _FORMAT, "version": _VERSION, **content}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path, lenient: bool = False) -> "Manifest | None":
        """Read the manifest of a directory; return None if there is none or, with `lenient`, if it is invalid.

        Raises:
            UserError: if it is not a valid manifest.
            OSError: if it cannot be read.
        """
        path = directory / MANIFEST
        try:
            content = load_json(path, _MAX_BYTES)
            if (content.pop("format"), content.pop("version")) != (_FORMAT, _VERSION):
                raise ValueError("it was written by another version")
            manifest = cls(**content)
            for entry in content["inputs"]:
                entry.pop("sample", None)  # checksum of samples, which earlier versions wrote
            manifest.inputs = [InputFile(**entry) for entry in content["inputs"]]
            manifest.tallies = {name: RecordCounts(**counts) for name, counts in content["tallies"].items()}
            manifest.files = {name: OutputFile(**entry) for name, entry in content["files"].items()}
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if lenient:
                return None
            raise UserError(
                f"{path} is not a valid manifest ({error}): prepare the data again with force=True"
            ) from error
        return manifest


def library_versions(job: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the libraries on which the content of a data set depends.

    `job` is the preparation's type, `parameters` are its settings.
    """
    found = {}
    for name in (*_LIBRARIES.get(job, ()), *(["pyarrow"] if parameters.get("output_format") == "parquet" else [])):
        with suppress(PackageNotFoundError):  # installed by other means than pip
            found[name] = version(name)
    return found


def describe_other_versions(manifest: Manifest) -> str:
    """Return a note about libraries that are installed in other versions than those of a manifest; "" without them."""
    installed = library_versions(manifest.job, manifest.parameters)
    other = [
        f"{name} {old}, and {installed[name]} is installed"
        for name, old in manifest.versions.items()
        if installed.get(name, old) != old
    ]
    return f"prepared with {'; '.join(other)}: the content may differ if it is prepared again" if other else ""


def verify(directory: Path, advance: Callable[[int], object] = lambda count: None) -> list[str]:
    """Compare a prepared directory with its manifest and describe the problems.

    All output files are read and must be unchanged. The record counts must add up. Local inputs that still exist must
    be the files that were read.

    Raises:
        UserError: if there is no manifest.
    """
    manifest = Manifest.read(directory)
    if manifest is None:
        raise UserError(f"{directory} contains no {MANIFEST}: it was not prepared, or its preparation was interrupted")
    problems: list[str] = []
    for name, counts in manifest.tallies.items():
        problems += [f"{name}: {problem}" for problem in counts.inconsistencies()]
        directories = tuple(f"{directory}/" for directory in counts.into)
        rows = sum(entry.rows or 0 for path, entry in manifest.files.items() if path.startswith(directories))
        if rows != counts.written:
            problems.append(f"{name}: {counts.written:,} records written, but the shards contain {rows:,}")
    for name, entry in manifest.files.items():
        try:
            found = checksum_file(directory / name, advance)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if found != replace(entry, rows=None):
            what = "size" if found.size != entry.size else "checksum"
            problems.append(f"{name} has changed since it was written: its {what} differs")
    for source in manifest.inputs:
        path = Path(source.source)
        if not is_url(source.source) and path.is_file() and not replace(source, mtime_ns=None).is_unchanged(path):
            problems.append(f"input {path} is not the file that was read")
    return problems
