# SPDX-License-Identifier: Apache-2.0
"""`bionemo finetune MODEL data=labels.csv`: find columns and type of labels in the user's own table.

The arguments are replaced by those of a complete command line, before the configuration is composed. Imports nothing
heavy.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.data.columns import find_protein_columns, find_smiles_columns
from bionemo.data.table import (
    Table,
    align_labels,
    is_missing,
    parse_number,
    read_table,
    single_column,
    split_labels,
)
from bionemo.finetuning.splits import LETTERS, find_sequences, split_columns

CONFIG = "downstream_table"
_TARGETS = ("label", "labels", "target", "class", "score", "fitness", "value", "y")
_IDS = ("id", "name", "entry", "accession", "record_id", "record_name", "mol_id", "compound id", "index", "")
_SEQUENCE_KEY, _TARGET_KEY = "model.data.sequence_column", "model.data.target_column"
_TYPE_KEY = "model.data.task_type"
_MAX_CLASSES = 10  # whole numbers with at most so many values are classes
_MAX_DIGITS = 15  # of a number; longer labels of digits are classes of residues
# Numbers as other programs and people write them: bounds, decimal commas, thousands separators, units.
_NEARLY_NUMBER = re.compile(
    r"'?[<>≤≥=~≈]+'?\s*[-+−]?\.?\d.*|−\.?\d.*|[-+]?\d*,\d+.*|[-+]?\d{1,3}([' ]\d{3})+([.,]\d+)?|"
    r"[-+]?\d+\s*([%±°].*|[pnumµμ]?M)|[-+]?\d*\.\d+\s*[^\d.].*"
)


def one_target_each(arguments: Sequence[str]) -> list[list[str]]:
    """Return a command line for each target of a sweep (`-m data=FILE model.data.target_column=A,B`).

    The type of the labels is found for each, and the results are in a directory for each.
    """
    is_sweep = {"-m", "--multirun"} & {*arguments} and any(each.startswith("data=") for each in arguments)
    for place, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if is_sweep and key.lstrip("+") == _TARGET_KEY and "," in value and value[0] not in "'\"[":
            return [[*arguments[:place], f"{key}={name}", *arguments[place + 1 :]] for name in value.split(",")]
    return [[*arguments]]


def replace_table_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Replace `data=` of a command line.

    Args:
        arguments: the command line. Keys that it sets are not detected.

    Returns:
        The new command line, and what was found. Without `data=`, the same command line and None.

    Raises:
        UserError: if the data cannot be read, or a column cannot be determined.
    """
    given = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    if "data" not in given:
        return list(arguments), None
    path = Path(given["data"]).expanduser()
    overrides, found = detect(read_table(path / "train" / "x000.csv" if path.is_dir() else path), given)
    names = _given(given, _TARGET_KEY)
    replaced = ("data", _TARGET_KEY) if names[1:] else ("data",)
    rest = [argument for argument in arguments if argument.lstrip("+").split("=")[0] not in replaced]
    new = (
        [] if any(argument.startswith(("--config-name", "-cn")) for argument in rest) else [f"--config-name={CONFIG}"]
    )
    overrides |= {
        "model.data.task_name": re.sub(r"\W+", "_", "_".join((path.stem, *([] if names[1:] else names)))),
        "model.data.dataset_path": str(path.absolute()),
    }
    known = given.keys() - {*replaced}
    new += (f"{key}={_quote(value)}" for key, value in overrides.items() if key not in known)
    return [*new, *rest], f"{path}: {found}"


def detect(table: Table, given: Mapping[str, str]) -> tuple[dict[str, str | list[str]], str]:
    """Find the columns and the type of the labels; several columns are a list.

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
    if len(table.columns) == 1:
        column = table.columns[0][:40]
        raise UserError(f"{table.path} has a single column {column!r}: separate columns by commas, semicolons or tabs")
    columns = f"{table.path} has the columns {', '.join(map(repr, table.columns))}"
    sequence = single_column(_SEQUENCE_KEY, _given(given, _SEQUENCE_KEY))
    smiles, proteins = find_smiles_columns(table.columns), find_protein_columns(table.columns)
    if not sequence and smiles and proteins:
        raise UserError(
            f"{table.path} has SMILES in column {table.columns[smiles[0]]!r} and proteins in column "
            f"{table.columns[proteins[0]]!r}: set {_SEQUENCE_KEY} to the column that the model reads"
        )
    sequence = sequence or find_sequences(table)
    if sequence is None:
        raise UserError(f"{columns}: set {_SEQUENCE_KEY} to the column of the sequences")
    target, *more = _given(given, _TARGET_KEY) or [_find_target(table, sequence) or ""]
    if not target:
        raise UserError(f"{columns}: set {_TARGET_KEY} to the column of the labels")
    sequences, labels, *others = (table.column(name, "correct it") for name in (sequence, target, *more))
    if re.fullmatch(LETTERS, sequence) and (parse_number(target) is not None or target in labels):
        shown = f"{sequence[:30]!r} and {target[:30]!r} in its first line"
        raise UserError(f"{table.path} has a record with {shown}: add a line with titles, as in sequence,label")
    for name, cells in zip((target, *more), (labels, *others), strict=True):
        if all(map(is_missing, cells)):
            raise UserError(f"{table.path}: all labels of column {name!r} are missing: set {_TARGET_KEY}")
    if (task_type := given.get(_TYPE_KEY)) is None:
        types = {find_task_type(sequences, cells, table.locations) for cells in (labels, *others)}
        task_type = types.pop() if not more else "regression" if "regression" in types else "multi-label"
    found = {_SEQUENCE_KEY: sequence, _TARGET_KEY: [target, *more] if more else target, _TYPE_KEY: task_type}
    names = ", ".join(map(repr, (target, *more)))
    description = f"sequences in column {sequence!r}, labels in column{'s' if more else ''} {names}: {task_type}"
    if task_type == "classification":
        counts = Counter(label.strip() for label in labels if not is_missing(label)).most_common()
        shown = ", ".join(f"{count:,} {label[:30]!r}" for label, count in counts[:_MAX_CLASSES])
        description += f" ({shown}{', ...' if counts[_MAX_CLASSES:] else ''})"
    return found, description


def find_task_type(sequences: Sequence[str], labels: Sequence[str], locations: Sequence[str]) -> str:
    """Return the type of a task from all of its labels except missing ones.

    Whole numbers with at most _MAX_CLASSES different values are classes, other numbers a regression. Labels as long as
    their sequences are classes of residues, as many numbers as residues their numbers, and other texts classes of
    sequences, or several labels if semicolons, or identifiers such as GO:0005524, are separated.

    Args:
        sequences: N sequences.
        labels: their labels.
        locations: file and line of each label, for messages.

    Raises:
        UserError: if a label is not a number but most different ones are.
    """
    found = [
        (text, align_labels(label, len(text)), location)
        for text, label, location in zip(map(_residues, sequences), labels, locations, strict=True)
        if not is_missing(label)
    ]
    if 2 * sum(_are_residue_numbers(text, label) for text, label, _ in found) > len(found):
        return "token-level-regression"
    numbers = {label: parse_number(label) for _, label, _ in found}
    values = {number for number in numbers.values() if number is not None}
    texts = {label for label, number in numbers.items() if number is None}
    if not texts:
        if _are_residue_digits(found):
            return "token-level-classification"
        is_class = len(values) <= _MAX_CLASSES and all(value.is_integer() for value in values)
        if not is_class and len(values) < len(numbers) and 2 * len(numbers) <= len(found):  # EC: 1.1, 1.10
            first: dict[float | None, str] = {}
            one, other = next((first[x], text) for text, x in numbers.items() if first.setdefault(x, text) != text)
            notify(f"the labels {one} and {other} are the same number; for classes, set {_TYPE_KEY}=classification")
        return "classification" if is_class else "regression"
    nearly = sum(_NEARLY_NUMBER.fullmatch(text) is not None for text in texts)
    if len(values) + nearly > len(texts) - nearly:
        label, location = next((label, location) for _, label, location in found if label in texts)
        raise UserError(
            f"{location}: the label {label[:30]!r} is not a number with a decimal point, as most others are: "
            f"correct it, leave the cell empty, or set {_TYPE_KEY}=classification"
        )
    if _are_residue_labels(found):
        return "token-level-classification"
    items = [split_labels(text) for text in texts]
    are_identifiers = all(any(map(str.isdigit, item)) for each in items for item in each)
    is_set = any(";" in text for text in texts) or (are_identifiers and max(map(len, items)) > 1)
    return "multi-label" if is_set else "classification"


def _are_residue_numbers(sequence: str, label: str) -> bool:
    """Return whether a cell has a number, or a missing value, for each residue."""
    items = split_labels(label)
    return len(items) == len(sequence) > 1 and all(is_missing(x) or parse_number(x) is not None for x in items)


def _residues(sequence: str) -> str:
    """Return a sequence without white space and without stop codons at its end."""
    return "".join(sequence.split()).rstrip("*")


def _are_residue_labels(found: Sequence[tuple[str, str, str]]) -> bool:
    """Return whether most texts are as long as their sequences.

    If all sequences have the same length, all texts must have it, and they must not be a few classes.
    """
    same = sum(len(text) == len(label) > 1 for text, label, _ in found)
    if len({len(text) for text, *_ in found}) > 1:
        return 2 * same > len(found)
    different = len({label for _, label, _ in found})
    return same == len(found) and (different > _MAX_CLASSES or 2 * different > len(found))


def _are_residue_digits(found: Sequence[tuple[str, str, str]]) -> bool:
    """Return whether most labels consist of digits, one for each residue; no number has leading zeros."""
    same = [label for text, label, _ in found if label.isdecimal() and len(text) == len(label)]
    sizes = {len(label) for label in same}
    if 2 * len(same) <= len(found) or max(sizes) < 2:
        return False
    return len(sizes) > 1 or max(sizes) > _MAX_DIGITS or any(label[0] == "0" for label in same)


def _find_target(table: Table, sequence: str) -> str | None:
    ignored = {sequence, *split_columns(table), "validation"}
    others = [name for name in table.columns if name not in ignored]
    for candidates in (
        [name for name in others if name.strip().lower() in _TARGETS],
        [name for name in others if name.strip().lower() not in _IDS],
    ):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _given(given: Mapping[str, str], key: str) -> list[str]:
    """Return the columns in a value of the command line, `A`, `A,B`, `[A,B]` or `'A, with a comma'`."""
    text = given.get(key, "")
    items = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    names = [text] if text.startswith(("'", '"')) else items.split(",")
    return [name.strip(" '\"") for name in names if name]


def _quote(value: str | list[str]) -> str:
    """Quote a value for Hydra."""
    if isinstance(value, list):
        return f"[{','.join(map(_quote, value))}]"
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
