# SPDX-License-Identifier: Apache-2.0
"""`bionemo finetune data=labels.csv model=MODEL`: find columns and type of labels in the user's own table.

The arguments are replaced by those of a complete command line, before the configuration is composed. Imports nothing
heavy.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.data.table import Table, find_sequence_columns, read_table

CONFIG = "downstream_table"
_TARGETS = ("label", "labels", "target", "class", "score", "fitness", "value", "y")
_IDS = ("id", "name", "entry", "accession", "record_id", "record_name", "index", "")
_SEQUENCE_KEY, _TARGET_KEY = "model.data.sequence_column", "model.data.target_column"
_TYPE_KEY = "model.data.task_type"
_PLAIN = re.compile(r"[\w .:;,()\[\]%/+*#@&|<>=~!?^-]+")  # no quotes, backslashes and `${`
_EXAMINED = 1000  # rows
_MAX_CLASSES = 10  # whole numbers with at most so many values are classes


def replace_table_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Replace `data=` and `model=` of a command line.

    Args:
        arguments: the command line. Keys that it sets are not detected.

    Returns:
        The new command line, and what was found. Without `data=`, the same command line and None.

    Raises:
        UserError: if the data cannot be read, or a column cannot be determined.
    """
    given = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    if "data" not in given:
        if "model" in given:
            raise UserError(
                "model=PATH needs data=PATH, a table of labelled sequences; or set model.restore_encoder_path"
            )
        return list(arguments), None
    path = Path(given["data"]).expanduser()
    overrides, found = detect(read_table(_first_file(path)), given)
    rest = [argument for argument in arguments if argument.lstrip("+").split("=")[0] not in ("data", "model")]
    new = (
        [] if any(argument.startswith(("--config-name", "-cn")) for argument in rest) else [f"--config-name={CONFIG}"]
    )
    if "model" in given:
        new.append(f"model.restore_encoder_path={given['model']}")
    overrides |= {
        "model.data.task_name": re.sub(r"\W+", "_", path.stem),
        "model.data.dataset_path": str(path.absolute()),
    }
    new += (f"{key}={_quote(value)}" for key, value in overrides.items() if key not in given)
    return [*new, *rest], f"{path}: {found}"


def detect(table: Table, given: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Find the columns and the type of the labels.

    Args:
        table: the table; of a data set in several files, the first one of the training split.
        given: overrides of the user.

    Returns:
        Values by configuration key, and a description.

    Raises:
        UserError: if a column cannot be determined.
    """
    if not table.rows:
        raise UserError(f"{table.path} has no rows: check the file")
    sequence = _given(given, _SEQUENCE_KEY) or find_sequences(table)
    if sequence is None:
        raise UserError(f"{_columns(table)}: set {_SEQUENCE_KEY} to the column of the sequences")
    target = _given(given, _TARGET_KEY) or _find_target(table, sequence)
    if target is None:
        raise UserError(f"{_columns(table)}: set {_TARGET_KEY} to the column of the labels")
    for name in (sequence, target):
        if not _PLAIN.fullmatch(name):  # Hydra would interpret the name
            raise UserError(f"{table.path}: the name of the column {name[:40]!r} has special characters: rename it")
    sequences, labels = (table.column(name, "correct it")[:_EXAMINED] for name in (sequence, target))
    task_type = given.get(_TYPE_KEY) or find_task_type(sequences, labels)
    found = {_SEQUENCE_KEY: sequence, _TARGET_KEY: target, _TYPE_KEY: task_type}
    return found, f"sequences in column {sequence!r}, labels in column {target!r}: {task_type}"


def find_task_type(sequences: Sequence[str], labels: Sequence[str]) -> str:
    """Return the type of a task: labels as long as their sequences are classes of residues, numbers a regression.

    Whole numbers with few different values are classes.
    """
    same_lengths = all(len(label) == len(text) for text, label in zip(sequences, labels, strict=True))
    if same_lengths and max(map(len, labels)) > 1:
        return "token-level-classification"
    try:
        numbers = {float(label) for label in labels}
    except ValueError:
        return "classification"
    classes = len(numbers) <= _MAX_CLASSES and all(number.is_integer() for number in numbers)
    return "classification" if classes else "regression"


def _first_file(path: Path) -> Path:
    if path.is_dir():
        return path / "train" / "x000.csv"
    if not path.exists():
        raise UserError(
            f"data={path} does not exist: give a CSV file, or a directory with {{train,val,test}}/x000.csv"
        )
    return path


def find_sequences(table: Table) -> str | None:
    """Return the name of the column of the sequences: by its name, else by its cells. None if this is ambiguous."""
    if usual := find_sequence_columns(table.columns):
        return table.columns[usual[0]] if len(usual) == 1 else None
    found = [
        name
        for name, cells in zip(table.columns, zip(*table.rows[:_EXAMINED], strict=True), strict=False)
        if all(re.fullmatch(r"[A-Z*-]{8,}", cell) for cell in cells) and len({*cells}) > 1
    ]
    return found[0] if len(found) == 1 else None


def _find_target(table: Table, sequence: str) -> str | None:
    others = [name for name in table.columns if name != sequence]
    for candidates in (
        [name for name in others if name.strip().lower() in _TARGETS],
        [name for name in others if name.strip().lower() not in _IDS],
    ):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _given(given: Mapping[str, str], key: str) -> str:
    """Return a value of the command line without quotes and brackets."""
    return given.get(key, "").strip("[]'\"")


def _quote(value: str) -> str:
    """Quote a value for Hydra."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _columns(table: Table) -> str:
    return f"{table.path} has the columns {', '.join(map(repr, table.columns[:_EXAMINED]))}"
