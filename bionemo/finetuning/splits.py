# SPDX-License-Identifier: Apache-2.0
"""Division of a table into training, validation and test set: by one of its columns, or at random by groups."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.data.table import Table, is_missing

_VALUES = {  # of a column of splits, in lower case
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "development": "val", "test": "test", "testing": "test",
}  # fmt: skip
_NAME = re.compile(
    r"(.*[\s_-])?(split|set|subset|partition|fold)s?([\s_-].*)?|"
    r"(is|in)?[\s_-]?(train(ing)?|val(id(ation)?)?|test(ing)?|dev|holdout)",
    re.IGNORECASE,
)
_EXAMINED = 1000  # rows in which a split must occur
_FLIP_VALIDATION = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def split_columns(table: Table, used: Collection[str] = ()) -> dict[str, list[str] | None]:
    """Return the columns that divide the rows, besides the `used` ones: the split of each row by column name.

    A column counts if all of its cells are names of splits (see `_VALUES`) or missing, and at least two splits occur.
    As in FLIP, rows of `train` with True in a column `validation` are in `val`. The split of a row with a missing cell
    is "". The value is None for a column that has the name of such a column, but other cells.
    """
    found: dict[str, list[str] | None] = {}
    flags = set()
    for number, name in enumerate(table.columns):
        if name in used or not table.rows:
            continue
        cells = {row[number] for row in table.rows[:_EXAMINED]}
        if any(cell.strip().lower() in _VALUES for cell in cells):
            splits = [_VALUES.get(row[number].strip().lower()) for row in table.rows]
            known = ["" if is_missing(row[number]) else split for row, split in zip(table.rows, splits, strict=True)]
            if "train" in known and len({*known} - {"", None}) > 1 and None not in known:
                given = [split or "" for split in known]
                found[name] = _with_validation(table, given)
                flags |= {"validation"} if found[name] != given else set()
                continue
        if _NAME.fullmatch(name.strip()):
            found[name] = None
    return {name: splits for name, splits in found.items() if splits or name.strip().lower() not in flags}


def _with_validation(table: Table, splits: list[str]) -> list[str]:
    """Apply a column `validation` of True and False, if there is one and no split is `val`."""
    names = [name.strip().lower() for name in table.columns]
    if "validation" not in names or "val" in splits:
        return splits
    cells = [row[names.index("validation")] for row in table.rows]
    flags = [False if is_missing(cell) else _FLIP_VALIDATION.get(cell.strip().lower()) for cell in cells]
    if None in flags:
        return splits
    return ["val" if flag and split == "train" else split for split, flag in zip(splits, flags, strict=True)]


def choose_column(table: Table, used: Collection[str], mode: str) -> tuple[list[str] | None, str, list[str]]:
    """Return the split of each row if a column divides the table, else None; its name; and notes about such columns.

    In modes other than `auto`, no column is used.
    """
    columns = split_columns(table, used)
    usable = sorted((name for name, splits in columns.items() if splits), key=lambda name: not _NAME.fullmatch(name))
    chosen = usable[0] if usable and mode == "auto" else None
    notes = []
    for name, splits in columns.items():
        if splits is None:
            text = "is not used: its cells are not train, val and test"
        elif name == chosen:
            counts = Counter(splits)
            text = f"divides the rows: {', '.join(f'{counts[each]:,} {each}' for each in ('train', 'val', 'test'))}"
            text += f"; {counts['']:,} without a split are left out" if counts[""] else ""
        else:
            text = f"is not used, but {chosen!r}" if chosen else f"is not used: model.data.split={mode}"
        notes.append(f"{table.path}: column {name!r} {text}")
    return columns[chosen] if chosen else None, chosen or "", notes


class Row(NamedTuple):
    """A row to divide."""

    text: str  # the sequence
    key: str  # equal for rows of the same protein or molecule
    label: str  # class of a classification of sequences, else ""


def divide_at_random(rows: Sequence[Row], source: str) -> list[str]:
    """Divide rows at random: a tenth for validation, a tenth for the test, the rest for training.

    Rows with the same key are in the same split, and each class is divided alike. The result depends neither on the
    order of the rows nor on the keys, except for which of them are equal. `source` is the file, for messages.

    Returns:
        The split of each row.

    Raises:
        UserError: if there are fewer than 10 different keys, or no class has 5.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[row.key].append(number)
    if len(groups) < 10:
        raise UserError(f"{source} has {len(groups)} different sequences: give 10 or more")
    classes: dict[str, list[tuple[bytes, list[int]]]] = defaultdict(list)
    for group in groups.values():
        place = blake2b(min(rows[number].text for number in group).encode()).digest()
        classes[min(rows[number].label for number in group)].append((place, group))
    splits = ["train"] * len(rows)
    for label, members in classes.items():
        tenth = (len(members) + 5) // 10 if label else len(members) // 10
        for rank, (_, group) in enumerate(sorted(members)[: 2 * tenth]):
            for number in group:
                splits[number] = "val" if rank < tenth else "test"
    if "test" not in splits:
        raise UserError(f"{source}: no class has 5 different sequences: add rows, or divide them into files")
    return splits
