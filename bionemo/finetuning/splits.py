# SPDX-License-Identifier: Apache-2.0
"""Columns of a labelled table, and its division into training, validation and test set: by a column, or at random.

Also by similarity of proteins.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bionemo.common.errors import UserError
from bionemo.data.columns import find_sequence_columns
from bionemo.data.table import Table, is_missing

_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # of a column `validation`
_VALUES = {  # of a column of splits, in lower case
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "development": "val", "test": "test", "testing": "test",
}  # fmt: skip
_FLAG = r"(is|in)?[\s_-]?(train(ing)?|val(id(ation)?)?|test(ing)?|dev|holdout)"
_NAME = re.compile(rf"(.*[\s_-])?(split|set|subset|partition|fold)s?([\s_-].*)?|{_FLAG}", re.IGNORECASE)
_REPORTED = re.compile(rf"split|set|partition|fold|{_FLAG}", re.IGNORECASE)  # if such a column is not used
_EXAMINED = 1000  # rows
LETTERS = r"[A-Z*-]{8,}"  # of proteins in a column without a usual title


def find_sequences(table: Table, proteins: bool | None = None) -> str | None:
    """Return the name of the column of the sequences: by its name, else by its cells. None if this is ambiguous.

    For `proteins` see `find_sequence_columns`.
    """
    if usual := find_sequence_columns(table.columns, proteins):
        return table.columns[usual[0]] if len(usual) == 1 else None
    found = [
        name
        for name, cells in zip(table.columns, zip(*table.rows[:_EXAMINED], strict=True), strict=False)
        if all(re.fullmatch(LETTERS, cell) for cell in cells) and len({*cells}) > 1
    ]
    return found[0] if len(found) == 1 else None


def split_columns(table: Table, used: Collection[str] = ()) -> dict[str, list[str] | None]:
    """Return the columns that divide the rows, besides the `used` ones: the split of each row by column name.

    A column counts if all of its cells are names of splits (see `_VALUES`) or missing, and at least two splits occur.
    As in FLIP, rows of `train` with True in a column `validation` are in `val`. The split of a row with a missing cell
    is "". The value is None for a column that has the name of such a column, but other cells.
    """
    found: dict[str, list[str] | None] = {}
    validation = ""  # the column of FLIP
    for number, name in enumerate(table.columns):
        cells = [row[number].strip() for row in table.rows]
        splits = {cell: "" if is_missing(cell) else _VALUES.get(cell.lower(), "?") for cell in {*cells}}
        names = {*splits.values()} - {""}
        if name not in used and name.strip().lower() == "validation":
            validation = name if all(is_missing(cell) or cell.lower() in _FLAGS for cell in cells) else ""
        if name not in used and "train" in names and "?" not in names and len(names) > 1:
            found[name] = [splits[cell] for cell in cells]
        elif name not in used and _NAME.fullmatch(name.strip()):
            found[name] = None
    if validation and any(found.values()):
        found.pop(validation, None)
        flags = [_FLAGS.get(cell.strip().lower(), False) for cell in table.column(validation, "")]
        for name, given in found.items():
            if given and "val" not in given:
                found[name] = ["val" if f and g == "train" else g for g, f in zip(given, flags, strict=True)]
    return found


def choose_column(table: Table, used: Collection[str], mode: str) -> tuple[list[str] | None, str, list[str]]:
    """Return the split of each row if a column divides the table, else None; its name; and notes about such columns.

    In modes other than `auto`, no column is used.
    """
    columns = split_columns(table, used)
    usable = sorted((name for name, splits in columns.items() if splits), key=lambda name: not _NAME.fullmatch(name))
    chosen = usable[0] if usable and mode == "auto" else None
    notes = []
    for name, splits in columns.items():
        if splits is None and not _REPORTED.fullmatch(name.strip()):
            continue
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


def divide_at_random(texts: Sequence[str], keys: Sequence[str], labels: Sequence[str], source: str) -> list[str]:
    """Divide rows at random: a tenth for validation, a tenth for the test, the rest for training.

    Rows with the same key are in the same split, and each class is divided alike. The result depends neither on the
    order of the rows nor on the keys, except for which of them are equal.

    Args:
        texts: the sequences.
        keys: equal for rows of the same protein or molecule.
        labels: classes of a classification of sequences, else "".
        source: the file, for messages.

    Returns:
        The split of each row.

    Raises:
        UserError: if there are fewer than 10 different keys, or no class has 5.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        groups[key].append(number)
    if len(groups) < 10:
        raise UserError(f"{source} has {len(groups)} different sequences: give 10 or more")
    classes: dict[str, list[tuple[bytes, list[int]]]] = defaultdict(list)
    for group in groups.values():
        place = blake2b(min(texts[number] for number in group).encode()).digest()
        classes[min(labels[number] for number in group)].append((place, group))
    splits = ["train"] * len(texts)
    for label, members in classes.items():
        tenth = (len(members) + 5) // 10 if label else len(members) // 10
        for rank, (_, group) in enumerate(sorted(members)[: 2 * tenth]):
            for number in group:
                splits[number] = "val" if rank < tenth else "test"
    if "test" not in splits:
        raise UserError(f"{source}: no class has 5 different sequences: add rows, or divide them into files")
    return splits


def divide_by_similarity(
    keys: Sequence[str], min_seq_id: float, coverage: float, source: str
) -> tuple[list[str], dict[str, Any], list[str]]:
    """Divide rows so that no validation or test protein is related to one of another split, see `divide_records`.

    A tenth of the rows is requested for validation and a tenth for the test. The result depends neither on the order
    of the rows nor on the number of processors.

    Args:
        keys: the protein of each row, without white space and in upper case.
        min_seq_id: share of identical columns of the alignment of related proteins.
        coverage: share of each of two related proteins that the alignment covers.
        source: the file, for messages.

    Returns:
        The split of each row, a report that compares the division with that of `divide_at_random`, and notes.

    Raises:
        UserError: if there are fewer than 10 different proteins, no cluster fits into a split, or MMseqs2 is not
            installed, or fails.
    """
    # imported only here, because the columns are found before anything heavy is imported
    import numpy as np
    import pyarrow as pa

    from bionemo.data.proteins.similarity import HELD_OUT, RelativeSearch, divide_records

    at_random = divide_at_random(keys, keys, [""] * len(keys), source)
    proteins, protein_of = np.unique(np.array(keys, object), return_inverse=True)
    texts = pa.array([each.encode() for each in proteins], pa.large_binary())
    numbers, tenth = np.arange(len(proteins)), len(keys) // 10
    with TemporaryDirectory() as directory:
        search = RelativeSearch(Path(directory), texts, numbers, min_seq_id, coverage, os.cpu_count() or 1)
        held_out = np.flatnonzero(np.array(at_random) != "train")
        division = divide_records(search, search.cluster(), protein_of, held_out, [tenth, tenth], seed=0)
    if lacking := [split for split, size in division.report["found"].items() if not size]:
        raise UserError(
            f"{source}: split=similarity finds no rows for {' and '.join(lacking)}: no cluster of related proteins "
            f"fits into a tenth of the rows ({tenth:,}): raise min_seq_id, or divide variants of one protein at random"
        )
    report = {"min_seq_id": min_seq_id, "coverage": coverage, **division.report}
    return [(*HELD_OUT, "train")[number] for number in division.splits], report, division.notes
