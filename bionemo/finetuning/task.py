# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences: CSV files with a sequence, what is to be said of it, and of which residues it is asked.

N sequences.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.table import incomplete, read_table

Kind = Literal["token-level-classification", "classification", "regression"]
NOT_ASKED = -1  # in the place of a class
_SHOWN = 8  # labels that a message lists


@dataclass(frozen=True)
class Columns:
    """Where a task stands in its files.

    Attributes:
        kind: a class for each residue, a class for each sequence, or a number for each sequence.
        sequence: column of the sequences.
        target: column of what is to be said.
        mask: column that says with 1 and 0 which residues are asked of; None: all.
    """

    kind: Kind
    sequence: str
    target: str
    mask: str | None = None


class Example(NamedTuple):
    """A row of a file.

    Attributes:
        place: file and line.
        text: the sequence.
        target: as it stands there.
        mask: as it stands there; None: there is none.
    """

    place: str
    text: str
    target: str
    mask: str | None


@dataclass(frozen=True)
class Split:
    """One of train, val and test.

    Attributes:
        texts: N sequences.
        targets: N arrays: [letters] int64 of classes with NOT_ASKED among them, or [] of one class or number.
    """

    texts: list[str]
    targets: list[np.ndarray]


def read(paths: Sequence[Path], columns: Columns) -> list[Example]:
    """Read the files of a split.

    Raises:
        UserError: when a file or a column is missing, a file has no rows, a row is incomplete, or labels or masks are
            not as long as their sequence.
    """
    return [example for path in paths for example in _examples(path, columns)]


def _examples(path: Path, columns: Columns) -> Iterator[Example]:
    table = read_table(path)
    wanted = [columns.sequence, columns.target, *([columns.mask] if columns.mask else [])]
    cells = [table.column(name, "name the one that is meant") for name in wanted]
    if not table.rows:
        raise UserError(f"{path} holds no examples: check the dataset's files")
    for place, *row in zip(table.places, *cells, strict=True):
        text, target, *mask = (cell.strip() for cell in row)
        if not (text and target and all(mask)):
            raise UserError(f"{place}: {incomplete(wanted)}")
        example = Example(place, text, target, mask[0] if mask else None)
        _see_that_it_fits(example, columns)
        yield example


def _see_that_it_fits(example: Example, columns: Columns) -> None:
    """See that there is one label, and one digit of the mask, for each residue."""
    if columns.kind != "token-level-classification":
        return
    letters = len(example.text)
    for name, text in (("labels", example.target), ("digits in the mask", example.mask)):
        if text is not None and len(text) != letters:
            raise UserError(f"{example.place}: {len(text):,} {name} for {letters:,} residues: each needs one")
    if example.mask is not None and (wrong := set(example.mask) - {"0", "1"}):
        raise UserError(
            f"{example.place}: the mask holds {min(wrong)!r}, expected 1 for what counts and 0 for the rest"
        )


def classes_of(examples: Sequence[Example], columns: Columns, size: int | None = None) -> tuple[str, ...]:
    """Labels that the training split has, in alphabetical order.

    Args:
        examples: of the training split.
        columns: of the task.
        size: how many there should be, at most; None: any number.

    Raises:
        UserError: when there are more, or one alone.
    """
    labels: set[str] = set()
    for example in examples:
        labels |= set(_asked(example)) if columns.kind == "token-level-classification" else {example.target}
    classes = tuple(sorted(labels))
    shown = ", ".join(classes[:_SHOWN]) + (", ..." if len(classes) > _SHOWN else "")
    if size is not None and len(classes) > size:
        raise UserError(
            f"column {columns.target!r} of the training split has {len(classes)} labels ({shown}), but target_sizes "
            f"says {size}: give their number"
        )
    if len(classes) < 2:
        raise UserError(
            f"column {columns.target!r} of the training split has the label {shown} alone: nothing to learn"
        )
    return classes


def _asked(example: Example) -> str:
    """Labels of the residues that are asked of."""
    if example.mask is None:
        return example.target
    return "".join(label for label, digit in zip(example.target, example.mask, strict=True) if digit == "1")


def encode(examples: Sequence[Example], columns: Columns, classes: Sequence[str]) -> Split:
    """Make targets of what stands in the files.

    Raises:
        UserError: for a label that the training split does not have, or what is no number where one is expected.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    return Split([example.text for example in examples], [_target(each, columns.kind, numbers) for each in examples])


def _target(example: Example, kind: Kind, numbers: dict[str, int]) -> np.ndarray:
    if kind == "regression":
        try:
            value = float(example.target)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"{example.place}: the target is {example.target[:30]!r}, expected a number")
        return np.array(value, np.float32)
    if kind == "classification":
        _known(example, {example.target}, numbers)
        return np.array(numbers[example.target], np.int64)
    _known(example, set(_asked(example)), numbers)
    table = np.full(0x110000 if not example.target.isascii() else 128, NOT_ASKED, np.int64)
    for label, number in numbers.items():
        if len(label) == 1 and ord(label) < len(table):
            table[ord(label)] = number
    targets = table[np.frombuffer(example.target.encode("utf-32-le"), np.uint32)]
    if example.mask is not None:
        targets[np.frombuffer(example.mask.encode(), np.uint8) == ord("0")] = NOT_ASKED
    return targets


def _known(example: Example, labels: set[str], numbers: dict[str, int]) -> None:
    if strange := labels - numbers.keys():
        known = ", ".join(list(numbers)[:_SHOWN])
        raise UserError(
            f"{example.place}: the label {min(strange)!r} is none of the training split's ({known}): correct it, or "
            "train on examples of it"
        )
