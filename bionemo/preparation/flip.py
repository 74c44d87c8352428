# SPDX-License-Identifier: Apache-2.0
"""Prepare the FLIP benchmark: FASTA files with a label in each header, or with one label per residue in a second file.

Dallago et al. 2021, "FLIP: Benchmark tasks in fitness landscape inference for proteins". Of each task, the split used
by BioNeMo v1 is prepared.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import FlipJob
from bionemo.data.files import SPLITS
from bionemo.data.shards.formats import BYTE_ORDER_MARK, Fasta, location, record_error
from bionemo.data.table import parse_number
from bionemo.preparation.inputs import read_input, resolve_tasks
from bionemo.preparation.staged_output import StagedOutput, stage_output
from bionemo.preparation.urls import absolute_source, find_source, is_url, join_source


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


class Record(NamedTuple):
    """A record of a FASTA file."""

    path: Path  # the file
    content: bytes  # of the file
    start: int  # offset of the record
    attributes: dict[str, str]  # the KEY=value pairs of its header; a value ends where the next KEY= begins
    text: str  # its sequence, or its labels

    def error(self, problem: str) -> UserError:
        """Create an error message with the file and line of the record."""
        return record_error(self.path, self.content, self.start, ValueError(problem))


def prepare(job: FlipJob) -> None:
    """Write `<output>/<task>/{train,val,test}/x000.csv` for each task; downloads go to `<output>/<task>/raw`.

    Raises:
        UserError: if a task is unknown, a file cannot be read or downloaded, or a record is invalid.
    """
    for name in (names := resolve_tasks(job.task_name, TASKS)):
        directory = Path(job.output) / name
        base = join_source(job.source, name)
        first = find_source(job.source, TASKS[name].sequences)
        if len(names) == 1 and not is_url(base) and not Path(base).is_dir() and Path(first).is_file():
            base = job.source  # the directory of this task
        task = TASKS[name]
        files = filter(None, (task.sequences, task.labels, task.resolved))
        sources = [absolute_source(find_source(base, file)) for file in files]
        with stage_output(directory, "flip", {"task": name}, SPLITS, sources=sources, force=job.force) as output:
            if output is not None:
                _prepare_task(task, base, directory / "raw", output)


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
            raise record.error(f"{name} is not in {task.labels}: complete one of the files")
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
    """Read the records of a FASTA file by their ids."""
    path, content = read_input(find_source(base, name), raw, output)
    content = content.removeprefix(BYTE_ORDER_MARK)
    before, marker, _ = content.partition(b">")
    if before.strip():
        start = len(before) - len(before.lstrip())
        raise record_error(path, content, start, ValueError("text before the first '>': begin with a header"))
    if not marker:
        raise UserError(f"{path} contains no records: check the source")
    fasta, records = Fasta(), dict[str, Record]()
    for start, found in fasta.records(content, path, len(before), len(content)):
        attributes = fasta.fields(found)
        text = b"".join(fasta.sequence(found).split()).decode(errors="replace")
        title, record = attributes["id"], Record(path, content, start, attributes, text)
        if not title:
            raise record.error("a record without an id: complete or remove it")
        if not text.isascii():
            raise record.error("non-ASCII letters: correct the sequence")
        if title in records:
            first = location(path, content, records[title].start)
            raise record.error(f"{title} occurs twice, first at {first}: remove one")
        records[title] = record
    return records


def _find_counterpart(name: str, record: Record, others: dict[str, Record], file: str) -> Record:
    """Return the record of the same name in another file, after checking that both have the same length."""
    if (other := others.get(name)) is None:
        raise record.error(f"{name} is not in {file}: complete one of the files")
    if len(record.text) != len(other.text):
        raise record.error(
            f"{name} has {len(record.text):,} letters, but {len(other.text):,} in {file}: each residue needs one"
        )
    return other


def _read_target(record: Record, is_number: bool) -> str:
    """Return the target, with the exact text of the header."""
    target = record.attributes.get("TARGET")
    if not target:
        raise record.error("TARGET= is missing: add it to the header")
    number = parse_number(target) if is_number else 0.0
    if number is None or math.isinf(number):
        raise record.error(f"TARGET={target} is not a number: correct the header")
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
            raise record.error(f"VALIDATION={found or ''} must be True or False: correct the header")
        case found, _:
            raise record.error(f"SET={found or ''} must be train, val or test: correct the header")
