# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences from CSV files: a sequence, its label or labels, and optionally a mask of labelled residues."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
from bionemo.finetuning.splits import Row, choose_column, divide_at_random
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

    def lacks_label(self, row: "Example") -> bool:
        """Return whether the label of a row is missing; `NA` are labels of a sequence of two residues."""
        per_residue = self.task_type == "token-level-classification"
        return is_missing(row.target) and not (row.target and per_residue and len(row.target) == len(row.text))


class Example(NamedTuple):
    """A row of a file: its file and line, and the text of its cells."""

    location: str
    text: str
    target: str
    mask: str | None

    @property
    def labelled(self) -> str:
        """Labels of the residues that have one."""
        if self.mask is None:
            return self.target
        return "".join(label for label, digit in zip(self.target, self.mask, strict=True) if digit == "1")


@dataclass(frozen=True)
class Split:
    """One of train, val and test."""

    texts: list[str]  # N sequences
    targets: list[np.ndarray]  # N arrays: classes [residues] int64, some of them IGNORED, or one class or number []
    locations: list[str]  # file and line of each sequence, for messages


class TaskData(NamedTuple):
    """The data of a task."""

    splits: dict[str, Split]  # splits by name
    classes: tuple[str, ...]  # names of the classes, () for regression
    notes: list[str]  # for the user: what was left out, and how the rows were divided
    division: str  # into splits: files, column NAME, scaffold, or random


def describe_truncation(name: str, count: int, total: int, max_length: int) -> str:
    """Return a note about the sequences of a split that are longer than the model accepts."""
    return f"{name}: {count:,} of {total:,} sequences are longer than {max_length:,} tokens and truncated"


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
    division = "files"
    if path.is_file():
        table = read_table(path)
        rows = read_examples([table], columns, notes)
        try:
            divided, division = _divide(table, rows, columns, split, on_invalid, molecules, notes)
        except UserError as error:
            raise UserError("; ".join([str(error), *notes])) from error
        examples = {name: divided[name] for name in names}
    else:
        if split != "auto":
            raise UserError(f"{key}.split={split}: {path} is divided already: remove the key, or give one file")
        examples = {}
        for name in names:
            paths = shard_paths(path, name, getattr(config.dataset, name), ".csv")
            examples[name] = read_examples([read_table(each) for each in paths], columns, notes)
            if molecules:
                examples[name] = _check_molecules(examples[name], path / name, columns, on_invalid, molecules, notes)
    texts = {each.text for split_examples in examples.values() for each in split_examples}
    keys = {text: _identity(text, molecules is not None) for text in texts}
    notes += (f"{path}: {note}" for note in _note_repetitions(examples, keys, columns.task_type == "classification"))
    classes: tuple[str, ...] = ()
    if columns.task_type != "regression":
        classes = find_classes(examples["train"], columns, config.target_sizes[0] if config.target_sizes else None)
    encoded = {name: encode(each, columns, classes) for name, each in examples.items()}
    if columns.task_type == "regression":
        _check_numbers(examples["train"], columns)
    return TaskData(encoded, classes, notes, division)


def _divide(
    table: Table, examples: list[Example], columns: TaskColumns, split: str, on_invalid: str,
    molecules: SmilesTokenizer | None,
    notes: list[str],
) -> tuple[dict[str, list[Example]], str]:  # fmt: skip
    """Divide the examples of a table: by one of its columns, by scaffold, or at random; say by which."""
    if split == "scaffold" and not molecules:
        raise UserError(f"{columns.key}.split=scaffold needs molecules: set it to random")
    if molecules:
        examples = _check_molecules(examples, Path(table.path), columns, on_invalid, molecules, notes)
    keys = [_identity(example.text, bool(molecules)) for example in examples]
    is_class = columns.task_type == "classification"
    rows = [
        Row(example.text, key, example.target if is_class else "") for example, key in zip(examples, keys, strict=True)
    ]
    used = {columns.sequence, columns.target, columns.mask or columns.target}
    given, column, column_notes = choose_column(table, used, split)
    notes += column_notes
    division = column and f"column {column}"
    if given is not None:
        by_location = dict(zip(table.locations, given, strict=True))
        found = [by_location[example.location] for example in examples]
        if lacking := {"val", "test"} - {*found}:
            notes.append(f"{table.path}: a tenth of the training rows is used as {' and '.join(sorted(lacking))}")
            training = [number for number, name in enumerate(found) if name == "train"]
            division += f", {' and '.join(sorted(lacking))} at random"
            drawn = divide_at_random([rows[number] for number in training], str(table.path))
            for number, name in zip(training, drawn, strict=True):
                found[number] = name if name in lacking else "train"
    elif split == "scaffold":
        found = divide_by_scaffold([row.text for row in rows], 0.1, 0.1)
        division = "scaffold"
        notes.append(f"{table.path}: divided by scaffold")
    else:
        division = "random"
        found = divide_at_random(rows, str(table.path))
    divided = {
        name: [example for example, each in zip(examples, found, strict=True) if each == name]
        for name in ("train", "val", "test")
    }
    return divided, division


def _check_molecules(
    examples: list[Example], path: Path, columns: TaskColumns, policy: str, vocabulary: SmilesTokenizer,
    notes: list[str],
) -> list[Example]:  # fmt: skip
    """Apply the policy for SMILES that the model cannot use, see `report_unusable`; return the examples in use."""
    dropped: set[int] = set()
    for problem, numbers in find_unusable([each.text for each in examples], vocabulary).items():
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


def _note_repetitions(examples: dict[str, list[Example]], keys: dict[str, str], is_class: bool) -> list[str]:
    """Return notes about sequences that are in the training split and another one, or in several classes.

    `keys` are the identities of the sequences.
    """
    notes, training = [], {keys[each.text] for each in examples["train"]}
    for name, split in examples.items():
        count = sum(keys[each.text] in training for each in split)
        if name != "train" and count:
            notes.append(f"{count:,} of {len(split):,} sequences of the {name} split are in the training split, too")
    pairs = {(keys[each.text], each.target) for split in examples.values() for each in split} if is_class else set()
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
    rows = [row for table in tables for row in _read_rows(table, columns)]
    missing = [row.target for row in rows if columns.lacks_label(row)]
    path = f"{tables[0].path}{f' and {len(tables) - 1:,} more files' if tables[1:] else ''}"
    problem = f"{path}: {len(missing):,} of {len(rows):,} rows have no label in column {columns.target!r}"
    if len(missing) == len(rows):
        raise UserError(f"{problem}: set {columns.key}.target_column to a column with labels")
    if missing:
        notes.append(f"{problem} ({describe_missing(missing)}): left out")
    return [row for row in rows if not columns.lacks_label(row)]


def _read_rows(table: Table, columns: TaskColumns) -> list[Example]:
    names = {"sequence_column": columns.sequence, "target_column": columns.target, "mask_column": columns.mask}
    wanted = {key: name for key, name in names.items() if name}
    cells = [table.column(name, f"set {columns.key}.{key}") for key, name in wanted.items()]
    if not table.rows:
        raise UserError(f"{table.path} has no examples: check the files of the dataset")
    examples = []
    for location, *row in zip(table.locations, *cells, strict=True):
        text, target, *mask = (cell.strip() for cell in row)
        if columns.task_type == "token-level-classification":
            target = align_labels(row[1], len(trim(text.encode())))
            mask = ["".join(map(class_name, cell.split())) for cell in mask]  # also `1.0 0.0`
        example = Example(location, text, target, mask[0] if mask else None)
        if not columns.lacks_label(example):
            is_peptide = text.isalpha() and text.isupper()  # such as NA
            if not all(mask) or (is_missing(text) and not is_peptide):
                raise UserError(f"{location}: {incomplete_row([*wanted.values()])}")
            if columns.task_type == "token-level-classification":
                _check_residues(example)
            elif columns.task_type == "classification":
                example = example._replace(target=class_name(target))
        examples.append(example)
    return examples


def class_name(label: str) -> str:
    """Return the same name for spellings of a class that depend on the program that wrote the file.

    A whole number has no decimals (`1.0` is `1`), and truth values are `True` and `False`.
    """
    if label.lower() in ("true", "false"):
        return label.capitalize()
    return str(int(float(label))) if _WHOLE_NUMBER.fullmatch(label) else label


def _check_residues(example: Example) -> None:
    """Check that each residue has one label and one digit of the mask."""
    residues = len(trim(example.text.encode()))
    for name, text in (("labels", example.target), ("digits in the mask", example.mask)):
        if text is not None and len(text) != residues:
            raise UserError(f"{example.location}: {len(text):,} {name} for {residues:,} residues: each needs one")
    if example.mask is not None and (invalid := set(example.mask) - {"0", "1"}):
        raise UserError(
            f"{example.location}: the mask has {min(invalid)!r}, expected 1 for labels that count and 0 for others"
        )


def find_classes(examples: Sequence[Example], columns: TaskColumns, size: int | None = None) -> tuple[str, ...]:
    """Return the labels of the training split in alphabetical order; `size` is their maximum number.

    Raises:
        UserError: if there are more, or only one.
    """
    labels: set[str] = set()
    for example in examples:
        labels |= set(example.labelled) if columns.task_type == "token-level-classification" else {example.target}
    classes = tuple(sorted(labels))
    shown = ", ".join(classes[:_MAX_SHOWN]) + (", ..." if len(classes) > _MAX_SHOWN else "")
    if size is not None and len(classes) > size:
        raise UserError(
            f"column {columns.target!r} of the training split has {len(classes)} labels ({shown}), but target_sizes "
            f"is {size}: correct it"
        )
    if len(classes) < 2:
        raise UserError(
            f"column {columns.target!r} of the training split has only the label {shown}: a classifier needs two"
        )
    return classes


def _check_numbers(examples: Sequence[Example], columns: TaskColumns) -> None:
    """Check that the numbers of the training split differ, and still do in fp32.

    Raises:
        UserError: if they do not.
    """
    numbers = np.array([float(example.target) for example in examples])
    name = f"column {columns.target!r} of the training split"
    if len(numbers) > 1 and len({*numbers.tolist()}) == 1:
        raise UserError(f"{name} has only the number {examples[0].target}: a regression needs different ones")
    rounding = float(np.abs(numbers - numbers.astype(np.float32)).max())
    if len(numbers) > 1 and rounding > _MAX_ROUNDING * numbers.std():
        raise UserError(f"{name} has numbers whose differences are lost in fp32: subtract their mean, or rescale them")


def encode(examples: Sequence[Example], columns: TaskColumns, classes: Sequence[str]) -> Split:
    """Convert labels to class numbers or numbers.

    Raises:
        UserError: for a label that the training split does not have, or a regression target that is not a number.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    targets = [_encode_target(example, columns.task_type, numbers) for example in examples]
    return Split([example.text for example in examples], targets, [example.location for example in examples])


def _encode_target(example: Example, task_type: TaskType, numbers: dict[str, int]) -> np.ndarray:
    if task_type == "regression":
        number = parse_number(example.target)
        value = np.array(math.nan if number is None or abs(number) > _MAX_NUMBER else number, np.float32)
        if not np.isfinite(value):
            raise UserError(
                f"{example.location}: the target is {example.target[:30]!r}, expected a number with a decimal point: "
                "correct it, or leave the cell empty, which leaves out the row"
            )
        return value
    if task_type == "classification":
        _check_labels(example, {example.target}, numbers)
        return np.array(numbers[example.target], np.int64)
    _check_labels(example, set(example.labelled), numbers)
    table = np.full(0x110000 if not example.target.isascii() else 128, IGNORED, np.int64)
    for label, number in numbers.items():
        if len(label) == 1 and ord(label) < len(table):
            table[ord(label)] = number
    targets = table[np.frombuffer(example.target.encode("utf-32-le"), np.uint32)]
    if example.mask is not None:
        targets[np.frombuffer(example.mask.encode(), np.uint8) == ord("0")] = IGNORED
    return targets


def _check_labels(example: Example, labels: set[str], numbers: dict[str, int]) -> None:
    if unknown := labels - numbers.keys():
        known = ", ".join(list(numbers)[:_MAX_SHOWN])
        raise UserError(
            f"{example.location}: the training split does not have the label {min(unknown)!r} (but {known}): "
            "correct it, or add training examples with it"
        )
