# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences from tables: a sequence, its label or labels, and optionally a mask of labelled residues."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.data import TaskType
from bionemo.data.table import (
    Table,
    align_labels,
    describe_missing,
    incomplete_row,
    is_missing,
    is_missing_sequence,
    parse_number,
    split_labels,
)
from bionemo.tokenizers.residues import trim

IGNORED = -1  # class of residues without a label
_TRUTH: dict[str | None, int] = {"0": 0, "1": 1, "False": 0, "True": 1}  # of one of several targets
_RELATION = re.compile(r"(standard[ _]?)?relation", re.IGNORECASE)  # title of a column of =, < and >
_BOUND = re.compile("[<>=~≈≤≥]+")  # cell of such a column
_MAX_SHOWN = 8  # labels in an error message
_WHOLE_NUMBER = re.compile(r"[+-]?\d{1,15}\.0*(e[+-]?0+)?", re.ASCII | re.IGNORECASE)  # with decimals
_MAX_ROUNDING = 1e-3  # of the standard deviation of numbers
_MAX_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TaskColumns:
    """Columns of a task."""

    task_type: TaskType
    sequence: str  # column of the sequences
    target: str  # column of the labels
    mask: str | None = None  # column of strings of 1 (residue has a label) and 0; None: all residues have one
    key: str = "model.data"  # configuration key of the task, for messages
    more: tuple[str, ...] = ()  # columns of further targets

    @property
    def targets(self) -> tuple[str, ...]:
        """All columns of labels."""
        return self.target, *self.more

    @property
    def per_residue(self) -> bool:
        """Whether each residue has a label."""
        return self.task_type.startswith("token-level")

    @property
    def is_set(self) -> bool:
        """Whether one cell holds all labels of a sequence."""
        return self.task_type == "multi-label" and not self.more


class Example(NamedTuple):
    """A row of a file."""

    location: str  # file and line
    text: str  # the sequence
    labels: list[str | None]  # of the sequence (multi-label: several), of each target or residue; None if it has none


@dataclass(frozen=True)
class Split:
    """One of train, val and test."""

    texts: list[str]  # N sequences
    #: N arrays [residues], [] or [targets]: int64 classes or 0 and 1 (int8 for labels in one column), or fp32 numbers;
    #: see `is_labelled`
    targets: list[np.ndarray]
    locations: list[str]  # file and line of each sequence, for messages


def is_labelled(targets: Any) -> Any:
    """Return which targets have a label, for an array or tensor of classes (not IGNORED) or of numbers (not NaN)."""
    return targets == targets if "float" in str(targets.dtype) else targets != IGNORED  # noqa: PLR0124


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
    names = f"columns {', '.join(map(repr, columns.targets))}" if columns.more else f"column {columns.target!r}"
    problem = f"{path}: {len(missing):,} of {total:,} rows have no label in {names}"
    if not rows:
        raise UserError(f"{problem}: set {columns.key}.target_column to a column with labels")
    if missing:
        notes.append(f"{problem} ({describe_missing(missing)}): left out")
    if columns.task_type == "regression":
        _note_bounds(tables, {row.location for row in rows}, notes)
    return rows


def _note_bounds(tables: Sequence[Table], used: Collection[str], notes: list[str]) -> None:
    """Append a note about the rows in use whose number is a bound, according to a column such as that of ChEMBL."""
    for number, name in enumerate(tables[0].columns):
        if _RELATION.fullmatch(name.strip()) and all(name in table.columns[number : number + 1] for table in tables):
            rows = (pair for table in tables for pair in zip(table.locations, table.rows, strict=True))
            cells = [row[number].strip(" '\"") for location, row in rows if location in used]
            if count := sum(cell != "=" and _BOUND.fullmatch(cell) is not None for cell in cells):
                notes.append(
                    f"{tables[0].path}: {count:,} rows have another value than = in column {name!r}, but their "
                    "numbers are used as exact values: remove these rows"
                )


def _read_rows(table: Table, columns: TaskColumns, rows: list[Example], missing: list[str]) -> None:
    """Append the rows with a label to `rows`, and the cells without one to `missing`."""
    names = {"sequence_column": [columns.sequence], "target_column": columns.targets, "mask_column": [columns.mask]}
    wanted = [(name, f"set {columns.key}.{key}") for key, each in names.items() for name in each if name]
    cells = [table.column(name, advice) for name, advice in wanted]
    if not table.rows:
        raise UserError(f"{table.path} has no examples: check the files of the dataset")
    is_text, count = columns.task_type == "token-level-classification", len(columns.targets)
    separator = next((each for each in ";," if any(each in cell for cell in cells[1])), None)  # None: blanks
    for location, cell, *found in zip(table.locations, *cells, strict=True):
        text, residues, targets, mask = cell.strip(), len(trim(cell.encode())), found[:count], found[count:]
        labels = align_labels(targets[0], residues) if is_text else targets[0].strip()
        if all(map(is_missing, (labels, *targets[1:]))) and not (is_text and labels and len(labels) == len(text)):
            missing.append(labels)  # `NA` are labels of a sequence of two residues
            continue
        if not all(map(str.strip, mask)) or not text or is_missing_sequence(text):
            raise UserError(f"{location}: {incomplete_row([name for name, _ in wanted])}")
        items: Sequence[str | None] = labels
        if columns.is_set:
            items = [*filter(None, map(str.strip, labels.split(separator)))]
        elif not is_text:
            items = [None if is_missing(each) else class_name(each.strip())
                     for each in (split_labels(labels) if columns.per_residue else targets)]  # fmt: skip
        if columns.per_residue:
            digits = "".join(map(class_name, mask[0].split())) if mask else "1" * residues  # also `1.0 0.0`
            items = _label_residues(location, residues, items, digits)
        rows.append(Example(location, text, [*items]))


def _label_residues(
    location: str, residues: int, labels: Sequence[str | None], digits: str
) -> list[str | None]:  # fmt: skip
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


def find_outputs(examples: Sequence[Example], columns: TaskColumns, size: int | None = None) -> tuple[str, ...]:
    """Return the names of the outputs of a head: classes, labels or targets; () for a single number.

    `size` is the maximum number of classes.

    Raises:
        UserError: see `find_classes`; or if the numbers of the training split are equal, or would be in fp32.
    """
    for place, target in enumerate(columns.targets if columns.more else ()):
        rows = [each._replace(labels=[each.labels[place]]) for each in examples if each.labels[place] is not None]
        find_outputs(rows, replace(columns, target=target, more=()))
    if columns.more or "regression" not in columns.task_type:
        return columns.targets if columns.more else find_classes(examples, columns, size)
    numbers = np.array([_parse_number(each, label) for each in examples for label in each.labels if label is not None])
    name = f"column {columns.target!r} of the training split has"
    if not len(numbers):
        raise UserError(f"{name} no labels: remove it from {columns.key}.target_column")
    if len(numbers) > 1 and np.ptp(numbers) == 0:
        raise UserError(f"{name} only the number {numbers[0]:g}: a regression needs different ones")
    rounding = float(np.abs(numbers - numbers.astype(np.float32)).max())
    if len(numbers) > 1 and rounding > _MAX_ROUNDING * numbers.std():
        raise UserError(f"{name} numbers whose differences are lost in fp32: subtract their mean, or rescale them")
    return ()


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
        raise UserError(f"{name} {f'only the label {shown}' if shown else 'no labels'}: a classifier needs two")
    return classes


def encode(examples: Sequence[Example], columns: TaskColumns, classes: Sequence[str]) -> Split:
    """Convert labels to class numbers or numbers.

    Raises:
        UserError: for a label that the training split does not have, or a regression target that is not a number.
    """
    numbers: dict[str | None, int] = {label: number for number, label in enumerate(classes)}
    numbers = {**(_TRUTH if columns.more else numbers), None: IGNORED}
    targets = []
    for example in examples:
        unknown = {*example.labels} - numbers.keys()
        if "regression" in columns.task_type:
            found = np.array([_parse_number(example, label) for label in example.labels], np.float32)
        elif columns.is_set:
            found = np.zeros(len(classes), np.int8)
            found[[numbers[label] for label in example.labels if label not in unknown]] = 1
        elif unknown and columns.more:
            raise UserError(
                f"{example.location}: the label {min(map(str, unknown))!r} is not 0 or 1: correct it, or set "
                f"{columns.key}.task_type=regression"
            )
        elif unknown:
            raise UserError(
                f"{example.location}: the training split does not have the label {min(map(str, unknown))!r} (but "
                f"{', '.join(classes[:_MAX_SHOWN])}): correct it, or add training examples with it"
            )
        else:
            found = np.array([numbers[label] for label in example.labels], np.int64)
        targets.append(found if columns.per_residue or len(found) > 1 else found.reshape(()))
    return Split([example.text for example in examples], targets, [example.location for example in examples])


def _parse_number(example: Example, label: str | None) -> float:
    """Return a number of a regression, NaN without a label."""
    number = math.nan if label is None else parse_number(label)
    if number is None or abs(number) > _MAX_NUMBER:
        raise UserError(
            f"{example.location}: the target is {str(label)[:30]!r}, expected a number with a decimal point: correct "
            "it, or leave the cell empty, which leaves out the row"
        )
    return number
