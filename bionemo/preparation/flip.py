# SPDX-License-Identifier: Apache-2.0
"""Prepare the FLIP benchmark: FASTA files with a label in each header, or with one label per residue in a second file.

Dallago et al. 2021, "FLIP: Benchmark tasks in fitness landscape inference for proteins". Of each task, the split used
by BioNeMo v1 is prepared.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import FlipJob
from bionemo.data.files import SPLITS
from bionemo.data.shards.formats import MARKER_IN_SEQUENCE
from bionemo.preparation.download import locate
from bionemo.preparation.inputs import read_input
from bionemo.preparation.staged_output import StagedOutput, stage_output
from bionemo.preparation.urls import expected_source, is_url, join_source


@dataclass(frozen=True)
class Task:
    """Files and target of a task."""

    sequences: str  # file of the sequences
    column: str = "target"  # name of the target column
    is_number: bool = False  # whether the target is a number; otherwise it is a class
    # file with one class letter per residue, and the split; None: split and target are in the headers
    labels: str | None = None
    resolved: str | None = None  # file that marks with 1 or 0 the residues to use; None: all residues
    # whether the file of sequences is shared with other splits; sequences without labels are dropped
    is_shared: bool = False


TASKS = {
    "aav": Task("seven_vs_many.fasta", is_number=True),
    "bind": Task("sequences.fasta", labels="from_publication.fasta", is_shared=True),
    "conservation": Task("sequences.fasta", "conservation", labels="sampled.fasta"),
    "gb1": Task("two_vs_rest.fasta", is_number=True),
    "meltome": Task("mixed_split.fasta", is_number=True),
    "sav": Task("mixed.fasta"),
    "scl": Task("mixed_soft.fasta", "scl_label"),
    "secondary_structure": Task("sequences.fasta", "3state", labels="sampled.fasta", resolved="resolved.fasta"),
}
# a value may contain spaces: it ends where the next KEY= begins
_ATTRIBUTE = re.compile(r"(?<!\S)([A-Z_]+)=(.*?)(?=\s+[A-Z_]+=|\s*$)")


class Record(NamedTuple):
    """A record of a FASTA file."""

    location: str  # file and line of its header, for messages
    attributes: dict[str, str]  # the KEY=value pairs of its header
    text: str  # its sequence, or its labels


def prepare(job: FlipJob) -> None:
    """Write `<output>/<task>/{train,val,test}/x000.csv` for each task; downloads go to `<output>/<task>/raw`.

    Raises:
        UserError: if a task is unknown, a file cannot be read or downloaded, or a record is invalid.
    """
    for name in (names := _resolve_task_names(job.task_name)):
        directory = Path(job.output) / name
        base = _task_source(job.source, name, is_only_task=len(names) == 1)
        task = TASKS[name]
        files = [expected_source(base, file) for file in (task.sequences, task.labels, task.resolved) if file]
        with stage_output(directory, "flip", {"task": name}, SPLITS, sources=files, force=job.force) as output:
            if output is not None:
                _prepare_task(task, base, directory / "raw", output)


def _resolve_task_names(task_name: str | list[str]) -> list[str]:
    names = [task_name] if isinstance(task_name, str) else list(task_name)
    for name in names:
        if name not in TASKS and name != "all":
            similar = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "choose some of these, or all:"
            raise UserError(f"task_name={name} is not a FLIP task: {hint} ({', '.join(TASKS)})")
    if not names:
        raise UserError(f"task_name is empty: choose some of {', '.join(TASKS)}, or all")
    return list(TASKS) if "all" in names else list(dict.fromkeys(names))


def _task_source(source: str, name: str, is_only_task: bool) -> str:
    """Return the directory or URL of a task; for a single task, the source may be this directory."""
    base = join_source(source, name)
    if is_only_task and not is_url(source) and not Path(base).is_dir():
        sequences = Path(join_source(source, TASKS[name].sequences))
        if sequences.is_file() or sequences.with_name(f"{sequences.name}.gz").is_file():
            return source
    return base


def _prepare_task(task: Task, base: str, raw: Path, output: StagedOutput) -> None:
    sequences = _read(base, task.sequences, raw, output)
    labels = _read(base, task.labels, raw, output) if task.labels else sequences
    resolved = _read(base, task.resolved, raw, output) if task.resolved else {}
    counts = output.add_counts(task.sequences, *SPLITS)
    counts.read = len(sequences)
    for name, record in sequences.items():
        if name in labels:
            continue
        if not task.is_shared:
            raise UserError(f"{record.location}: {name} is not in {task.labels}: complete one of the files")
        counts.drop(f"not in {task.labels}")
    for name, record in resolved.items():
        _find_counterpart(name, record, sequences, task.sequences)
    rows: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
    for name, record in labels.items():
        row = [name, _find_counterpart(name, record, sequences, task.sequences).text.upper()]
        row.append(record.text if task.labels else _read_target(record, task.is_number))
        if task.resolved:
            row.append(_find_counterpart(name, record, resolved, task.resolved).text)
        rows[_read_split(record)].append(row)
    header = ["id", "sequence", task.column, *(["resolved"] if task.resolved else [])]
    for split in SPLITS:
        counts.written += output.write_csv(f"{split}/x000.csv", header, rows[split])


def _read(base: str, name: str, raw: Path, output: StagedOutput) -> dict[str, Record]:
    path, display_path = locate(base, name, raw)
    records: dict[str, Record] = {}
    for title, record in _parse_fasta(path, read_input(path, display_path, output)):
        if title in records:
            raise UserError(f"{record.location}: {title} occurs twice, first at {records[title].location}: remove one")
        records[title] = record
    if not records:
        raise UserError(f"{path} contains no records: check the source")
    return records


def _parse_fasta(path: Path, content: bytes) -> Iterator[tuple[str, Record]]:
    """Yield the records of a FASTA file with their ids, the first words of the headers."""
    header: tuple[int, str] | None = None
    parts: list[str] = []
    lines = content.removeprefix(b"\xef\xbb\xbf").splitlines()
    for number, raw in enumerate([*lines, b">"], 1):
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: the line is not UTF-8: convert the file") from error
        if not line.startswith(">"):
            if not line.isascii():
                raise UserError(f"{path}:{number}: non-ASCII letters: correct the line")
            if ">" in line:
                raise UserError(f"{path}:{number}: {MARKER_IN_SEQUENCE}")
            if line and header is None:
                raise UserError(f"{path}:{number}: text before the first '>': begin the file with a header")
            parts.append(line)
            continue
        if header is not None:
            location = f"{path}:{header[0]}"
            name, attributes = (*header[1].split(maxsplit=1), "", "")[:2]
            if not name or not (text := "".join(parts)):
                missing = "a sequence" if name else "an id"
                raise UserError(f"{location}: a record without {missing}: complete or remove it")
            yield name, Record(location, dict(_ATTRIBUTE.findall(attributes)), text)
        header, parts = (number, line[1:]), []


def _find_counterpart(name: str, record: Record, others: dict[str, Record], file: str) -> Record:
    """Return the record of the same name in another file, after checking that both have the same length."""
    if (other := others.get(name)) is None:
        raise UserError(f"{record.location}: {name} is not in {file}: complete one of the files")
    if len(record.text) != len(other.text):
        raise UserError(
            f"{record.location}: {name} has {len(record.text):,} letters, but {len(other.text):,} in {file}: "
            "each residue needs one"
        )
    return other


def _read_target(record: Record, is_number: bool) -> str:
    """Return the target, with the exact text of the header."""
    target = record.attributes.get("TARGET")
    if not target:
        raise UserError(f"{record.location}: TARGET= is missing: add it to the header")
    if is_number:
        try:
            is_valid = math.isfinite(float(target))
        except ValueError:
            is_valid = False
        if not is_valid:
            raise UserError(f"{record.location}: TARGET={target} is not a number: correct the header")
    return target


def _read_split(record: Record) -> str:
    match record.attributes.get("SET"), record.attributes.get("VALIDATION"):
        case "test", _:
            return "test"
        case ("train", "True") | ("val", _):
            return "val"
        case "train", "False":
            return "train"
        case "train", found:
            raise UserError(f"{record.location}: VALIDATION={found or ''} must be True or False: correct the header")
        case found, _:
            raise UserError(f"{record.location}: SET={found or ''} must be train, val or test: correct the header")
