# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences from CSV files: a sequence, its label or labels, and optionally a mask of labelled residues."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import UserError, shorten
from bionemo.config.schema.data import TaskType
from bionemo.config.schema.downstream import DownstreamDataConfig
from bionemo.config.schema.model import DownstreamDatasetConfig
from bionemo.data.molecules.content_checks import find_unusable, report_unusable
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.data.molecules.smiles import parse_smiles, write_canonical
from bionemo.data.shards.ranges import shard_paths
from bionemo.data.table import (
    Table,
    align_labels,
    describe_missing,
    incomplete_row,
    is_missing,
    parse_number,
    read_table,
    single_column,
)
from bionemo.finetuning.splits import choose_column, divide_at_random, divide_by_similarity
from bionemo.tokenizers import SmilesTokenizer, Vocabulary
from bionemo.tokenizers.residues import trim
from bionemo.tokenizers.smiles import end_at_space

IGNORED = -1  # class of residues without a label
_MAX_SHOWN = 8  # labels in an error message
_WHOLE_NUMBER = re.compile(r"[+-]?\d{1,15}\.0*(e[+-]?0+)?", re.ASCII | re.IGNORECASE)  # with decimals
_MAX_ROUNDING = 1e-3  # of the standard deviation of numbers
_MAX_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TaskColumns:
    """Columns of a task."""

    task_type: TaskType  # a class for each residue, a class for each sequence, or a number for each sequence
    sequence: str  # column of the sequences
    target: str  # column of the labels
    mask: str | None = None  # column of strings of 1 (residue has a label) and 0; None: all residues have one
    key: str = "model.data"  # configuration key of the task, for messages

    @property
    def per_residue(self) -> bool:
        """Whether each residue has a label."""
        return self.task_type == "token-level-classification"


class Example(NamedTuple):
    """A row of a file."""

    location: str  # file and line
    text: str  # the sequence
    labels: list[str | None]  # the label, or one for each residue, None if it has none


@dataclass(frozen=True)
class Split:
    """One of train, val and test."""

    texts: list[str]  # N sequences
    targets: list[np.ndarray]  # N arrays: classes [residues] int64, some of them IGNORED, or one class or number []
    locations: list[str]  # file and line of each sequence

    def labelled_positions(self, max_length: int) -> list[np.ndarray]:
        """Return the residues with a label among the first `max_length` of each sequence; [0] for a single label."""
        first = np.zeros(1, np.int64)
        return [np.flatnonzero(each[:max_length] != IGNORED) if each.ndim else first for each in self.targets]


class TaskData(NamedTuple):
    """The data of a task."""

    splits: dict[str, Split]  # splits by name
    classes: tuple[str, ...]  # names of the classes, () for regression
    notes: list[str]  # for the user: what was left out, and how the rows were divided
    #: entries of the report; split: files, column NAME, scaffold, similarity (with a report of its own), or random
    division: dict[str, Any]


def describe_truncation(name: str, count: int, total: int, max_length: int) -> str:
    """Return a note about the sequences of a split that are longer than the model accepts."""
    limit = f"{max_length:,} tokens without begin and end"
    return f"{name}: {count:,} of {total:,} sequences are longer than {limit} and truncated"


def read_splits(
    config: DownstreamDataConfig | DownstreamDatasetConfig,
    key: str,
    names: Sequence[str],
    vocabulary: Vocabulary | None = None,
) -> TaskData:
    """Read the splits `names` of a task, of which the first is `train`.

    Rows without a label are left out.

    Args:
        config: configuration of the data; a directory with a file for each split, or one file that is divided.
        key: configuration key of `config` in error messages.
        names: the splits.
        vocabulary: vocabulary of the model, from which it follows whether the sequences are molecules.

    Raises:
        UserError: if a file is missing or invalid, or has labels that the training split does not have.
    """
    target = single_column(f"{key}.target_column", config.target_column)
    if target is None:
        raise UserError(f"{key}.target_column is empty: set it to the column of the labels")
    mask = single_column(f"{key}.mask_column", config.mask_column)
    columns = TaskColumns(config.task_type, config.sequence_column, target, mask, key)
    split, on_invalid = "auto", "skip"
    if isinstance(config, DownstreamDataConfig):
        split, on_invalid = config.split, config.on_invalid
    path, molecules = Path(config.dataset_path), vocabulary if isinstance(vocabulary, SmilesTokenizer) else None
    notes: list[str] = []
    division: dict[str, Any] = {"split": "files"}
    if path.is_file():
        table = read_table(path)
        rows = read_examples([table], columns, notes)
        try:
            rows = _check_molecules(rows, path, columns, on_invalid, molecules, notes)
            divided, division = _divide(table, rows, columns, config, molecules is not None, notes)
        except UserError as error:
            raise UserError("; ".join([str(error), *notes])) from error
        examples = {name: [row for row, each in zip(rows, divided, strict=True) if each == name] for name in names}
    else:
        if split != "auto":
            raise UserError(f"{key}.split={split}: {path} is divided already: remove the key, or give one file")
        examples = {}
        for name in names:
            tables = [read_table(each) for each in shard_paths(path, name, getattr(config.dataset, name), ".csv")]
            rows = read_examples(tables, columns, notes)
            examples[name] = _check_molecules(rows, path / name, columns, on_invalid, molecules, notes)
    repetitions = _note_repetitions(examples, molecules is not None, columns.task_type == "classification")
    notes += (f"{path}: {note}" for note in repetitions)
    classes: tuple[str, ...] = ()
    if columns.task_type != "regression":
        classes = find_classes(examples["train"], columns, config.target_sizes[0] if config.target_sizes else None)
    encoded = {name: encode(each, columns, classes) for name, each in examples.items()}
    if columns.task_type == "regression":
        _check_numbers(examples["train"], columns)
    return TaskData(encoded, classes, notes, division)


def _divide(
    table: Table, examples: list[Example], columns: TaskColumns,
    config: DownstreamDataConfig | DownstreamDatasetConfig, molecules: bool, notes: list[str],
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    """Divide the examples of a table: by one of its columns, by scaffold or similarity, or at random; say by which."""
    mode = config.split if isinstance(config, DownstreamDataConfig) else "auto"
    if mode == "scaffold" and not molecules:
        raise UserError(f"{columns.key}.split=scaffold needs molecules: set it to random")
    if mode == "similarity" and molecules:
        raise UserError(f"{columns.key}.split=similarity needs proteins: set it to scaffold")
    texts, path = [example.text for example in examples], str(table.path)
    keys = [_identity(text, molecules) for text in texts]
    is_class = columns.task_type == "classification"
    labels = [str(example.labels[0]) if is_class else "" for example in examples]
    used = {columns.sequence, columns.target, columns.mask or columns.target}
    given, column, column_notes = choose_column(table, used, mode)
    notes += column_notes
    if given is None and mode == "scaffold":
        notes.append(f"{path}: divided by scaffold")
        return divide_by_scaffold(texts, 0.1, 0.1), {"split": mode}
    if given is None and mode == "similarity" and isinstance(config, DownstreamDataConfig):
        found, report, more = divide_by_similarity(keys, config.min_seq_id, config.coverage, path)
        notes += (f"{path}: divided by similarity: {note}" for note in more)
        return found, {"split": mode, mode: report}
    if given is None:
        return divide_at_random(texts, keys, labels, path), {"split": "random"}
    by_location = dict(zip(table.locations, given, strict=True))
    found, division = [by_location[example.location] for example in examples], f"column {column}"
    if lacking := {"val", "test"} - {*found}:
        shown = " and ".join(sorted(lacking))
        notes.append(f"{path}: a tenth of the training rows is used as {shown}")
        division += f", {shown} at random"
        training = [number for number, name in enumerate(found) if name == "train"]
        parts = tuple([each[number] for number in training] for each in (texts, keys, labels))
        drawn = divide_at_random(parts[0], parts[1], parts[2], path)
        for number, name in zip(training, drawn, strict=True):
            found[number] = name if name in lacking else "train"
    return found, {"split": division}


def _check_molecules(
    examples: list[Example], path: Path, columns: TaskColumns, policy: str, vocabulary: SmilesTokenizer | None,
    notes: list[str],
) -> list[Example]:  # fmt: skip
    """Apply the policy for SMILES that the model cannot use, see `report_unusable`; return the examples in use."""
    dropped: set[int] = set()
    unusable = find_unusable([each.text for each in examples], vocabulary) if vocabulary else {}
    for problem, numbers in unusable.items():
        first, key = examples[numbers[0]], f"{columns.key}.on_invalid"
        name = f"{first.location}, {shorten(first.text)}"
        notes.append(report_unusable(str(path), problem, len(numbers), len(examples), name, policy, key))
        dropped |= {*numbers} if policy == "skip" else {*()}
    return [example for number, example in enumerate(examples) if number not in dropped]


@lru_cache(1 << 16)
def _identity(text: str, molecules: bool) -> str:
    """Return the canonical form of a protein or molecule, by which equal sequences are grouped."""
    if not molecules:
        return trim(text.encode()).decode().upper()
    molecule = parse_smiles(smiles := end_at_space(text))
    return write_canonical(molecule) if molecule else smiles


def _note_repetitions(examples: dict[str, list[Example]], molecules: bool, is_class: bool) -> list[str]:
    """Return notes about sequences that are in the training split and another one, or in several classes."""
    notes = []
    keys = {name: [_identity(each.text, molecules) for each in split] for name, split in examples.items()}
    training = {*keys["train"]}
    for name, found in keys.items():
        count = sum(key in training for key in found)
        if name != "train" and count:
            notes.append(f"{count:,} of {len(found):,} sequences of the {name} split are in the training split, too")
    if not is_class:
        return notes
    pairs = {(key, str(row.labels[0])) for name in keys for key, row in zip(keys[name], examples[name], strict=True)}
    if several := sum(count > 1 for count in Counter(key for key, _ in pairs).values()):
        notes.append(f"{several:,} sequences have several classes in different rows")
    spellings = Counter(label.lower() for label in sorted({label for _, label in pairs}))
    if alike := [label for label, count in spellings.items() if count > 1]:
        notes.append(f"several classes are {alike[0]!r} in upper or lower case: write them alike if they are the same")
    return notes


def read_examples(tables: Sequence[Table], columns: TaskColumns, notes: list[str]) -> list[Example]:
    """Return the rows of a split that have a label; append a note about the others to `notes`.

    Raises:
        UserError: if a column is missing, a table has no rows or no labels, a row is incomplete, or the numbers of
            labels and residues differ.
    """
    rows: list[Example] = []
    missing: list[str] = []
    for table in tables:
        _read_rows(table, columns, rows, missing)
    total = len(rows) + len(missing)
    path = f"{tables[0].path}{f' and {len(tables) - 1:,} more files' if tables[1:] else ''}"
    problem = f"{path}: {len(missing):,} of {total:,} rows have no label in column {columns.target!r}"
    if not rows:
        raise UserError(f"{problem}: set {columns.key}.target_column to a column with labels")
    if missing:
        notes.append(f"{problem} ({describe_missing(missing)}): left out")
    return rows


def _read_rows(table: Table, columns: TaskColumns, rows: list[Example], missing: list[str]) -> None:
    """Append the rows with a label to `rows`, and the cells without one to `missing`."""
    names = {"sequence_column": columns.sequence, "target_column": columns.target, "mask_column": columns.mask}
    wanted = {key: name for key, name in names.items() if name}
    cells = [table.column(name, f"set {columns.key}.{key}") for key, name in wanted.items()]
    if not table.rows:
        raise UserError(f"{table.path} has no examples: check the files of the dataset")
    for location, cell, target, *mask in zip(table.locations, *cells, strict=True):
        text, residues = cell.strip(), len(trim(cell.encode()))
        labels = align_labels(target, residues) if columns.per_residue else target.strip()
        if is_missing(labels) and not (columns.per_residue and labels and len(labels) == len(text)):
            missing.append(labels)  # `NA` are labels of a sequence of two residues
            continue
        is_peptide = text.isalpha() and text.isupper()  # such as NA
        if not all(map(str.strip, mask)) or (is_missing(text) and not is_peptide):
            raise UserError(f"{location}: {incomplete_row([*wanted.values()])}")
        if columns.per_residue:
            digits = "".join(map(class_name, mask[0].split())) if mask else "1" * residues  # also `1.0 0.0`
            rows.append(Example(location, text, _label_residues(location, residues, labels, digits)))
        else:
            rows.append(Example(location, text, [labels if columns.task_type == "regression" else class_name(labels)]))


def _label_residues(location: str, residues: int, labels: str, digits: str) -> list[str | None]:
    """Return the label of each residue, None where the digit of the mask is 0.

    Raises:
        UserError: if there is not one label and one digit for each residue.
    """
    for name, text in (("labels", labels), ("digits in the mask", digits)):
        if len(text) != residues:
            raise UserError(f"{location}: {len(text):,} {name} for {residues:,} residues: each needs one")
    if invalid := {*digits} - {"0", "1"}:
        raise UserError(
            f"{location}: the mask has {min(invalid)!r}, expected 1 for labels that count and 0 for others"
        )
    return [label if digit == "1" else None for label, digit in zip(labels, digits, strict=True)]


def class_name(label: str) -> str:
    """Return the same name for spellings of a class that depend on the program that wrote the file.

    A whole number has no decimals (`1.0` is `1`), and truth values are `True` and `False`.
    """
    if label.lower() in ("true", "false"):
        return label.capitalize()
    return str(int(float(label))) if _WHOLE_NUMBER.fullmatch(label) else label


def find_classes(examples: Sequence[Example], columns: TaskColumns, size: int | None = None) -> tuple[str, ...]:
    """Return the labels of the training split in alphabetical order; `size` is their maximum number.

    Raises:
        UserError: if there are more, or only one.
    """
    classes = tuple(sorted({label for example in examples for label in example.labels if label is not None}))
    shown = ", ".join(classes[:_MAX_SHOWN]) + (", ..." if len(classes) > _MAX_SHOWN else "")
    name = f"column {columns.target!r} of the training split has"
    if size is not None and len(classes) > size:
        raise UserError(f"{name} {len(classes)} labels ({shown}), but target_sizes is {size}: correct it")
    if len(classes) < 2:
        raise UserError(f"{name} only the label {shown}: a classifier needs two")
    return classes


def _check_numbers(examples: Sequence[Example], columns: TaskColumns) -> None:
    """Check that the numbers of the training split differ, and still do in fp32.

    Raises:
        UserError: if they do not.
    """
    numbers = np.array([float(str(example.labels[0])) for example in examples])
    name = f"column {columns.target!r} of the training split has"
    if len(numbers) > 1 and np.ptp(numbers) == 0:
        raise UserError(f"{name} only the number {examples[0].labels[0]}: a regression needs different ones")
    rounding = float(np.abs(numbers - numbers.astype(np.float32)).max())
    if len(numbers) > 1 and rounding > _MAX_ROUNDING * numbers.std():
        raise UserError(f"{name} numbers whose differences are lost in fp32: subtract their mean, or rescale them")


def encode(examples: Sequence[Example], columns: TaskColumns, classes: Sequence[str]) -> Split:
    """Convert labels to class numbers or numbers.

    Raises:
        UserError: for a label that the training split does not have, or a regression target that is not a number.
    """
    numbers: dict[str | None, int] = {label: number for number, label in enumerate(classes)}
    numbers[None] = IGNORED
    targets = []
    for example in examples:
        if columns.task_type == "regression":
            targets.append(_parse_target(example))
            continue
        if unknown := {*example.labels} - numbers.keys():
            raise UserError(
                f"{example.location}: the training split does not have the label {min(map(str, unknown))!r} (but "
                f"{', '.join(classes[:_MAX_SHOWN])}): correct it, or add training examples with it"
            )
        found = np.array([numbers[label] for label in example.labels], np.int64)
        targets.append(found if columns.per_residue else found.reshape(()))
    return Split([example.text for example in examples], targets, [example.location for example in examples])


def _parse_target(example: Example) -> np.ndarray:
    """Return the number of a regression, [] fp32."""
    text = str(example.labels[0])
    number = parse_number(text)
    if number is None or abs(number) > _MAX_NUMBER:
        raise UserError(
            f"{example.location}: the target is {text[:30]!r}, expected a number with a decimal point: correct it, or "
            "leave the cell empty, which leaves out the row"
        )
    return np.array(number, np.float32)
