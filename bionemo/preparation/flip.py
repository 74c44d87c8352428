# SPDX-License-Identifier: Apache-2.0
"""The FLIP benchmark: FASTA files with a label in each header, or with labels residue by residue in a second file.

Dallago et al. 2021, "FLIP: Benchmark tasks in fitness landscape inference for proteins"; one split of each task is
used, the one that BioNeMo v1 used.
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
from bionemo.data.shards.fasta import RAN_TOGETHER
from bionemo.preparation.addresses import expected, is_url, join, public
from bionemo.preparation.download import locate
from bionemo.preparation.inputs import read_small
from bionemo.preparation.writer import Draft, draft


@dataclass(frozen=True)
class Task:
    """Where a task keeps what, and what its target is called in the result.

    Attributes:
        sequences: file of the sequences.
        column: name of the target.
        number: whether the target is a number; otherwise it is a class.
        labels: file with one class letter per residue, and the split; None: split and target are in the headers.
        resolved: file that says with 1 or 0 which residues count; None: all.
        shared: whether other splits share the file of sequences; those without labels are left out.
    """

    sequences: str
    column: str = "target"
    number: bool = False
    labels: str | None = None
    resolved: str | None = None
    shared: bool = False


TASKS = {
    "aav": Task("seven_vs_many.fasta", number=True),
    "bind": Task("sequences.fasta", labels="from_publication.fasta", shared=True),
    "conservation": Task("sequences.fasta", "conservation", labels="sampled.fasta"),
    "gb1": Task("two_vs_rest.fasta", number=True),
    "meltome": Task("mixed_split.fasta", number=True),
    "sav": Task("mixed.fasta"),
    "scl": Task("mixed_soft.fasta", "scl_label"),
    "secondary_structure": Task("sequences.fasta", "3state", labels="sampled.fasta", resolved="resolved.fasta"),
}
SPLITS = ("train", "val", "test")
# a value may hold spaces: it ends where the next KEY= begins
_ATTRIBUTE = re.compile(r"(?<!\S)([A-Z_]+)=(.*?)(?=\s+[A-Z_]+=|\s*$)")


class Record(NamedTuple):
    """An entry of a FASTA file.

    Attributes:
        place: file and line of its header, for messages.
        attributes: the KEY=value words of its header.
        text: its sequence, or its labels.
    """

    place: str
    attributes: dict[str, str]
    text: str


def prepare(job: FlipJob) -> None:
    """Write `<output>/<task>/{train,val,test}/x000.csv` for each task; downloads go to `<output>/<task>/raw`.

    Raises:
        UserError: an unknown task, a file that cannot be had, or a record that is not as it should be.
    """
    for name in (names := _names(job.task_name)):
        output = Path(job.output) / name
        base = _base(job.source, name, alone=len(names) == 1)
        task = TASKS[name]
        files = [expected(base, file) for file in (task.sequences, task.labels, task.resolved) if file]
        with draft(output, "flip", {"task": name}, SPLITS, sources=files, force=job.force) as made:
            if made is not None:
                _prepare(task, base, output / "raw", made)


def _names(asked: str | list[str]) -> list[str]:
    names = [asked] if isinstance(asked, str) else list(asked)
    for name in names:
        if name not in TASKS and name != "all":
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"did you mean {near[0]}?" if near else "choose some of these, or all:"
            raise UserError(f"task_name={name} is no task of FLIP: {hint} ({', '.join(TASKS)})")
    if not names:
        raise UserError(f"task_name names no task: choose some of {', '.join(TASKS)}, or all")
    return list(TASKS) if "all" in names else list(dict.fromkeys(names))


def _base(source: str, name: str, alone: bool) -> str:
    """Find the directory or URL of a task; the source may be that directory itself if it is the only task."""
    base = join(source, name)
    if alone and not is_url(source) and not Path(base).is_dir():
        main = Path(join(source, TASKS[name].sequences))
        if main.is_file() or main.with_name(f"{main.name}.gz").is_file():
            return source
    return base


def _prepare(task: Task, base: str, raw: Path, made: Draft) -> None:
    sequences = _read(base, task.sequences, raw, made)
    labels = _read(base, task.labels, raw, made) if task.labels else sequences
    resolved = _read(base, task.resolved, raw, made) if task.resolved else {}
    tally = made.tally(task.sequences, *SPLITS)
    tally.read = len(sequences)
    for name, record in sequences.items():
        if name in labels:
            continue
        if not task.shared:
            raise UserError(f"{record.place}: {name} is not in {task.labels}: complete one file or the other")
        reason = f"not in {task.labels}"
        tally.dropped[reason] = tally.dropped.get(reason, 0) + 1
    for name, record in resolved.items():
        _same(name, record, sequences, task.sequences)
    rows: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
    for name, record in labels.items():
        row = [name, _same(name, record, sequences, task.sequences).text.upper()]
        row.append(record.text if task.labels else _target(record, task.number))
        if task.resolved:
            row.append(_same(name, record, resolved, task.resolved).text)
        rows[_split(record)].append(row)
    header = ["id", "sequence", task.column, *(["resolved"] if task.resolved else [])]
    for split in SPLITS:
        tally.written += made.write_csv(f"{split}/x000.csv", header, rows[split])


def _read(base: str, name: str, raw: Path, made: Draft) -> dict[str, Record]:
    path = locate(base, name, raw)
    content = read_small(path, made, public(join(base, name)) if is_url(base) else None)
    records: dict[str, Record] = {}
    for title, record in _records(path, content):
        if title in records:
            raise UserError(f"{record.place}: {title} is there twice, first at {records[title].place}: remove one")
        records[title] = record
    if not records:
        raise UserError(f"{path} holds no records: check the source")
    return records


def _records(path: Path, content: bytes) -> Iterator[tuple[str, Record]]:
    """Go through a FASTA file: the id, which is a header's first word, and the rest."""
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
                raise UserError(f"{path}:{number}: letters beyond ASCII: correct the line")
            if ">" in line:
                raise UserError(f"{path}:{number}: {RAN_TOGETHER}")
            if line and header is None:
                raise UserError(f"{path}:{number}: text before the first '>': begin the file with a header")
            parts.append(line)
            continue
        if header is not None:
            place = f"{path}:{header[0]}"
            name, words = (*header[1].split(maxsplit=1), "", "")[:2]
            if not name or not (text := "".join(parts)):
                raise UserError(
                    f"{place}: a record without {'a sequence' if name else 'an id'}: complete or remove it"
                )
            yield name, Record(place, dict(_ATTRIBUTE.findall(words)), text)
        header, parts = (number, line[1:]), []


def _same(name: str, record: Record, others: dict[str, Record], file: str) -> Record:
    """Find a record in another file; it must be as long there."""
    if (other := others.get(name)) is None:
        raise UserError(f"{record.place}: {name} is not in {file}: complete one file or the other")
    if len(record.text) != len(other.text):
        raise UserError(
            f"{record.place}: {name} has {len(record.text):,} letters, but {len(other.text):,} in {file}: "
            "each residue needs one"
        )
    return other


def _target(record: Record, number: bool) -> str:
    """The target, as the very text that stands in the header."""
    target = record.attributes.get("TARGET")
    if not target:
        raise UserError(f"{record.place}: TARGET= is missing: add it to the header")
    if number:
        try:
            good = math.isfinite(float(target))
        except ValueError:
            good = False
        if not good:
            raise UserError(f"{record.place}: TARGET={target} is not a number: correct the header")
    return target


def _split(record: Record) -> str:
    match record.attributes.get("SET"), record.attributes.get("VALIDATION"):
        case "test", _:
            return "test"
        case ("train", "True") | ("val", _):
            return "val"
        case "train", "False":
            return "train"
        case "train", found:
            raise UserError(f"{record.place}: VALIDATION={found or ''} must be True or False: correct the header")
        case found, _:
            raise UserError(f"{record.place}: SET={found or ''} must be train, val or test: correct the header")
