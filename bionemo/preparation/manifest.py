# SPDX-License-Identifier: Apache-2.0
"""The manifest of a prepared data set: its settings, the files it was made from, its files, and counts of records."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from bionemo.common.errors import UserError
from bionemo.common.regular import load_json
from bionemo.preparation.checksums import InputFile, OutputFile, measure
from bionemo.preparation.names import MANIFEST, is_output

_FORMAT, _VERSION = "bionemo-prepared", 1
_LARGEST = 64 << 20  # bytes
T = TypeVar("T")


@dataclass
class Tally:
    """Counts of one input: every record read is written into `into`, or dropped for a reason."""

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
    """What `manifest.json` holds.

    Attributes:
        job: the kind of preparation.
        parameters: settings that determine the result, as plain JSON values.
        inputs: the files read, in the order in which the result depends on them.
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
            UserError: when it is not a manifest that a preparation can have written.
            OSError: when it cannot be read.
        """
        path = directory / MANIFEST
        try:
            return cls.load(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise UserError(
                f"{path} is not a valid manifest ({error}): prepare the data again with force=True"
            ) from error

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a file.

        Raises:
            ValueError: when it is not a manifest that a preparation can have written.
            OSError: when it cannot be read.
        """
        content = load_json(path, _LARGEST)
        _expect(isinstance(content, dict), "the whole file")
        if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise ValueError("it was written by another version")
        return cls(
            job=_text(content.get("job"), "job"),
            parameters=_mapping(content.get("parameters"), "parameters", lambda value, _: value),
            inputs=[_input(entry) for entry in _list(content.get("inputs"), "inputs")],
            tallies=_mapping(content.get("tallies"), "tallies", _tally),
            files=_files(content.get("files")),
        )


def _expect(holds: bool, where: str) -> None:
    if not holds:
        raise ValueError(f"wrong type or value: {where}")


def _text(value: Any, where: str) -> str:
    _expect(isinstance(value, str), where)
    return str(value)


def _count(value: Any, where: str) -> int:
    _expect(type(value) is int and 0 <= value < 1 << 63, where)
    return int(value)


def _list(value: Any, where: str) -> list[Any]:
    _expect(isinstance(value, list), where)
    return list(value)


def _mapping(value: Any, where: str, parse: Callable[[Any, str], T]) -> dict[str, T]:
    _expect(isinstance(value, dict), where)
    return {key: parse(each, where) for key, each in value.items()}


def _fields(value: Any, kind: type, where: str) -> dict[str, Any]:
    """Check that a JSON object has no other keys than the fields of a dataclass."""
    _expect(isinstance(value, dict) and {*value} <= {*kind.__dataclass_fields__}, where)  # type: ignore[attr-defined]
    return dict(value)


def _input(value: Any) -> InputFile:
    entry = _fields(value, InputFile, "inputs")
    times = entry.get("mtime_ns"), entry.get("sample")
    _expect(times[0] is None or type(times[0]) is int, "inputs: mtime_ns")
    _expect(times[1] is None or isinstance(times[1], str), "inputs: sample")
    return InputFile(
        _text(entry.get("source"), "inputs: source"),
        _count(entry.get("size"), "inputs: size"),
        _text(entry.get("sha256"), "inputs: sha256"),
        *times,
    )


def _tally(value: Any, where: str) -> Tally:
    entry = _fields(value, Tally, where)
    into = [_text(name, f"{where}: into") for name in _list(entry.pop("into", None), f"{where}: into")]
    tally = Tally(into)
    for key, found in entry.items():
        if key in ("dropped", "changed"):
            setattr(tally, key, _mapping(found, f"{where}: {key}", _count))
        elif found is not None or not key.startswith("letters_"):
            setattr(tally, key, _count(found, f"{where}: {key}"))
    return tally


def _file(value: Any, where: str) -> OutputFile:
    entry = _fields(value, OutputFile, where)
    rows = entry.get("rows")
    return OutputFile(
        _count(entry.get("size"), f"{where}: size"),
        _text(entry.get("sha256"), f"{where}: sha256"),
        None if rows is None else _count(rows, f"{where}: rows"),
    )


def _files(value: Any) -> dict[str, OutputFile]:
    files = _mapping(value, "files", _file)
    for name in files:
        _expect(is_output(name), f"files: {name[:80]!a} is not a name that a preparation writes")
    return files


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
        raise UserError(f"{directory} holds no {MANIFEST}: it is not, or not completely, prepared")
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
        except UserError as error:  # not a regular file
            problems.append(str(error))
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
