# SPDX-License-Identifier: Apache-2.0
"""The account of a prepared data set, written beside it: what went in, what came out, what was left out and why."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from bionemo.errors import UserError

NAME = "manifest.json"
_FORMAT, _VERSION = "bionemo-prepared", 1
_BLOCK = 4 << 20


@dataclass(frozen=True)
class InputFile:
    """A file that was read: where it came from, and its bytes."""

    source: str  # path or URL
    size: int
    sha256: str

    def is_as_read(self, path: Path) -> bool:
        """Whether a file is this one."""
        return path.stat().st_size == self.size and measure(path).sha256 == self.sha256


@dataclass(frozen=True)
class OutputFile:
    """A file that was written."""

    size: int
    sha256: str
    rows: int | None = None  # records, for a CSV file with one header line


@dataclass
class Tally:
    """The books of one input: every record read is written into `into`, or dropped for a reason."""

    into: list[str]  # directories of the output, relative
    read: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    letters_read: int | None = None  # of sequences, after line ends; None where nobody counts them
    letters_written: int | None = None
    letters_dropped: int = 0
    changed: dict[str, int] = field(default_factory=dict)  # records that are not as they were, by what was done

    @property
    def problems(self) -> Iterator[str]:
        """What does not add up."""
        if self.read != self.written + sum(self.dropped.values()):
            yield f"{self.read:,} records read, {self.written:,} written, {sum(self.dropped.values()):,} dropped"
        if self.letters_read is not None and self.letters_read != (self.letters_written or 0) + self.letters_dropped:
            yield (
                f"{self.letters_read:,} letters read, {self.letters_written or 0:,} written, "
                f"{self.letters_dropped:,} dropped"
            )


@dataclass
class Manifest:
    """All of it.

    Attributes:
        job: the kind of preparation.
        parameters: what decides the result, as plain JSON values.
        inputs: the files read.
        tallies: by a name for each input.
        files: by path below the directory, with `/`.
    """

    job: str
    parameters: dict[str, Any]
    inputs: list[InputFile] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    files: dict[str, OutputFile] = field(default_factory=dict)

    def text(self) -> str:
        """Render as JSON."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest | None":
        """Read the manifest of a directory; None when it has none.

        Raises:
            UserError: when it cannot be understood.
        """
        path = directory / NAME
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != _FORMAT or content.pop("version") != _VERSION:
                raise UserError(f"{path} was written by another version: prepare the data again with force=True")
            return cls(
                job=content["job"],
                parameters=content["parameters"],
                inputs=[InputFile(**entry) for entry in content["inputs"]],
                tallies={name: Tally(**entry) for name, entry in content["tallies"].items()},
                files={name: OutputFile(**entry) for name, entry in content["files"].items()},
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}): prepare the data again with force=True") from error


def measure(path: Path, advance: Callable[[int], object] = lambda count: None, csv: bool = False) -> OutputFile:
    """Read a file through: its size, checksum and, of a CSV file, its rows below the header.

    Raises:
        OSError: it cannot be read.
    """
    digest, size, lines = hashlib.sha256(), 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            lines += block.count(b"\n") if csv else 0
            advance(len(block))
    return OutputFile(size, digest.hexdigest(), lines - 1 if csv else None)


def verify(directory: Path, advance: Callable[[int], object] = lambda count: None) -> list[str]:
    """Hold a prepared directory against its manifest.

    Every file is read through and must be as it was written; the books must balance; inputs that can still be reached
    must be those that were read.

    Returns:
        One phrase for each thing that is not as it should be.

    Raises:
        UserError: when there is no manifest.
    """
    manifest = Manifest.read(directory)
    if manifest is None:
        raise UserError(f"{directory} holds no {NAME}: it is not, or not completely, prepared")
    problems = [f"{name}: {problem}" for name, tally in manifest.tallies.items() for problem in tally.problems]
    for name, tally in manifest.tallies.items():
        rows = sum(entry.rows or 0 for path, entry in manifest.files.items() if _within(path, tally.into))
        if rows != tally.written:
            problems.append(f"{name}: {tally.written:,} records written, but the shards hold {rows:,}")
    for name, entry in manifest.files.items():
        try:
            found = measure(directory / name, advance, csv=entry.rows is not None)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if found != entry:
            what = "rows" if found.rows != entry.rows else "size" if found.size != entry.size else "checksum"
            problems.append(f"{name} is not as it was written: its {what} differs")
    if not problems:  # what is damaged has been told, and cannot be counted
        problems += _letters_lost(directory, manifest)
    for source in manifest.inputs:
        path = Path(source.source)
        for place in dict.fromkeys((path, directory / path.name)):  # raw data may have moved with the result
            if place.is_file() and not source.is_as_read(place):
                problems.append(f"input {place} is not the file that was read")
    return problems


def _letters_lost(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Hold the letters in the shards against those that were written."""
    for name, tally in manifest.tallies.items():
        if tally.letters_written is not None:
            shards = [path for path in manifest.files if _within(path, tally.into) and path.endswith(".csv")]
            letters = sum(_letters(directory / path) for path in shards)
            if letters != tally.letters_written:
                yield f"{name}: {tally.letters_written:,} letters written, but the shards hold {letters:,}"


def _letters(path: Path) -> int:
    """Count the letters of the sequences of a shard; -1 if it cannot be read as one."""
    options = pyarrow.csv.ConvertOptions(include_columns=["sequence"], column_types={"sequence": pa.binary()})
    try:
        with pyarrow.csv.open_csv(
            path, pyarrow.csv.ReadOptions(block_size=32 << 20), convert_options=options
        ) as reader:
            return sum(pc.sum(pc.binary_length(batch.column(0))).as_py() or 0 for batch in reader)
    except (OSError, pa.ArrowException):
        return -1


def _within(path: str, directories: list[str]) -> bool:
    return any(path.startswith(f"{directory}/") for directory in directories)
