# SPDX-License-Identifier: Apache-2.0
"""The data of a task: the labelled sequences of each split, and how a single file is divided into splits."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from bionemo.common.errors import UserError, shorten
from bionemo.config.schema.downstream import DownstreamDataConfig
from bionemo.config.schema.model import DownstreamDatasetConfig
from bionemo.data.molecules.content_checks import find_unusable, report_unusable
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.data.molecules.smiles import parse_smiles, write_canonical
from bionemo.data.shards.ranges import shard_paths
from bionemo.data.table import Table, read_table, single_column
from bionemo.finetuning.labels import Example, Split, TaskColumns, encode, find_outputs, read_examples
from bionemo.finetuning.splits import choose_column, divide_at_random, divide_by_similarity
from bionemo.tokenizers import SmilesTokenizer, Vocabulary
from bionemo.tokenizers.residues import trim
from bionemo.tokenizers.smiles import end_at_space


class TaskData(NamedTuple):
    """The data of a task."""

    splits: dict[str, Split]  # splits by name
    classes: tuple[str, ...]  # names of the outputs of the head: classes, labels or targets; () for a single number
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
    targets = [config.target_column] if isinstance(config.target_column, str) else config.target_column
    if not targets:
        raise UserError(f"{key}.target_column is empty: set it to the column of the labels")
    if targets[1:] and config.task_type not in ("regression", "multi-label"):
        raise UserError(
            f"{key}.task_type={config.task_type}: several targets are numbers (regression) or 0 and 1 (multi-label): "
            f"set one of these, or start a run for each of {', '.join(targets)}"
        )
    mask = single_column(f"{key}.mask_column", config.mask_column)
    columns = TaskColumns(config.task_type, config.sequence_column, targets[0], mask, key, tuple(targets[1:]))
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
    size = config.target_sizes[0] if config.target_sizes else None
    classes = find_outputs(examples["train"], columns, size)
    encoded = {name: encode(each, columns, classes) for name, each in examples.items()}
    if columns.is_set:
        found = {label for rows in examples.values() for row in rows for label in row.labels}
        if new := len(found) - len(classes):
            notes.append(f"{path}: {new:,} labels are not in the training split: the head does not predict them")
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
    used = {columns.sequence, *columns.targets, columns.mask or columns.target}
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
        column = f"column {columns.sequence!r}, which {columns.key}.sequence_column selects"
        notes.append(report_unusable(str(path), problem, len(numbers), len(examples), name, policy, key, column))
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
