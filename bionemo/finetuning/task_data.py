# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences from CSV files: a sequence, its label or labels, and optionally a mask of labelled residues."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.data import TaskType
from bionemo.config.schema.downstream import DownstreamDataConfig
from bionemo.config.schema.model import DownstreamDatasetConfig
from bionemo.data.shards.ranges import shard_paths
from bionemo.data.table import incomplete_row, read_table
from bionemo.tokenizers.residues import trim

IGNORED = -1  # class of residues without a label
_MAX_SHOWN = 8  # labels in an error message


@dataclass(frozen=True)
class TaskColumns:
    """Columns of a task."""

    task_type: TaskType  # a class for each residue, a class for each sequence, or a number for each sequence
    sequence: str  # column of the sequences
    target: str  # column of the labels
    mask: str | None = None  # column of strings of 1 (residue has a label) and 0; None: all residues have one
    key: str = "model.data"  # configuration key of the task, for messages


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


def read_splits(
    config: DownstreamDataConfig | DownstreamDatasetConfig, key: str, names: Sequence[str]
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Read the splits `names` of a task, of which the first is `train`; `key` is that of `config` in error messages.

    Returns:
        The splits by name, and the names of the classes, () for regression.

    Raises:
        UserError: if a file is missing or invalid, or has labels that the training split does not have.
    """
    target = _single(f"{key}.target_column", config.target_column)
    if target is None:
        raise UserError(f"{key}.target_column is empty: set it to the column of the labels")
    mask = _single(f"{key}.mask_column", config.mask_column)
    columns = TaskColumns(config.task_type, config.sequence_column, target, mask, key)
    path = Path(config.dataset_path)
    if path.is_file():
        divided = divide(read_examples([path], columns))
        examples = {name: divided[name] for name in names}
    else:
        files = {name: shard_paths(path, name, getattr(config.dataset, name), ".csv") for name in names}
        examples = {name: read_examples(paths, columns) for name, paths in files.items()}
    classes: tuple[str, ...] = ()
    if columns.task_type != "regression":
        classes = find_classes(examples["train"], columns, config.target_sizes[0] if config.target_sizes else None)
    return {name: encode(each, columns, classes) for name, each in examples.items()}, classes


def divide(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Divide examples at random: a tenth for validation, a tenth for the test, the rest for training.

    Equal sequences are in the same split. The result depends on the sequences only, not on their order.

    Raises:
        UserError: if there are fewer than 10 different sequences.
    """
    texts = sorted({example.text for example in examples}, key=lambda text: blake2b(text.encode()).digest())
    if len(texts) < 10:
        raise UserError(
            f"{examples[0].location.rpartition(':')[0]} has {len(texts)} different sequences: give 10 or more"
        )
    tenth = len(texts) // 10
    names = dict.fromkeys(texts, "train") | dict.fromkeys(texts[:tenth], "val")
    names |= dict.fromkeys(texts[tenth : 2 * tenth], "test")
    splits: dict[str, list[Example]] = {"train": [], "val": [], "test": []}
    for example in examples:
        splits[names[example.text]].append(example)
    return splits


def _single(key: str, value: str | list[str] | None) -> str | None:
    names = [value] if isinstance(value, str) else value or []
    if len(names) > 1:
        raise UserError(f"{key}={names}: only one target is supported: start a run for each")
    return names[0] if names else None


def read_examples(paths: Sequence[Path], columns: TaskColumns) -> list[Example]:
    """Read the files of a split.

    Raises:
        UserError: if a file or a column is missing, a file has no rows, a row is incomplete, or the numbers of labels
            and residues differ.
    """
    return [example for path in paths for example in _read_file(path, columns)]


def _read_file(path: Path, columns: TaskColumns) -> Iterator[Example]:
    table = read_table(path)
    names = {"sequence_column": columns.sequence, "target_column": columns.target, "mask_column": columns.mask}
    wanted = {key: name for key, name in names.items() if name}
    cells = [table.column(name, f"set {columns.key}.{key}") for key, name in wanted.items()]
    if not table.rows:
        raise UserError(f"{path} has no examples: check the files of the dataset")
    for location, *row in zip(table.locations, *cells, strict=True):
        text, target, *mask = (cell.strip() for cell in row)
        if not (text and target and all(mask)):
            raise UserError(f"{location}: {incomplete_row([*wanted.values()])}")
        example = Example(location, text, target, mask[0] if mask else None)
        if columns.task_type == "token-level-classification":
            _check_residues(example)
        yield example


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
        try:
            value = float(example.target)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"{example.location}: the target is {example.target[:30]!r}, expected a number")
        return np.array(value, np.float32)
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
