# SPDX-License-Identifier: Apache-2.0
"""Prepare the MoleculeNet tasks ESOL, FreeSolv and Lipophilicity as `<task>/{train,val,test}/x000.csv`."""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import MoleculeNetJob, SplitSizes
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.data.table import parse_table
from bionemo.preparation.download import locate
from bionemo.preparation.inputs import read_input
from bionemo.preparation.molecules import canonical_smiles
from bionemo.preparation.sequences import SPLITS, split_sizes
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import expected_source, is_url, redact_url

FILES = {"ESOL": "delaney-processed.csv", "FreeSolv": "SAMPL.csv", "Lipophilicity": "Lipophilicity.csv"}
_V1_TASKS = {"delaney-processed": "delaney-processed.csv", "SAMPL": "SAMPL.csv"}  # BioNeMo v1 used file names


def prepare(job: MoleculeNetJob) -> None:
    """Distribute the rows of each task, unchanged, to validation, test and training, at random or by scaffold.

    Rows of the same molecule are in the same split.

    Raises:
        UserError: if a task is unknown, a file cannot be read or downloaded, a SMILES is invalid and its policy is
            `error`, or the split sizes leave no training rows.
    """
    if job.task_name == "all":
        tasks = list(FILES)
    else:
        tasks = [job.task_name] if isinstance(job.task_name, str) else job.task_name
    files = FILES | _V1_TASKS
    for task in tasks:
        if task not in files:
            raise UserError(f"task_name={task} is not known: choose {', '.join(FILES)} or all")
    # data sets prepared before the option existed were divided at random
    parameters = result_parameters(job, "task_name", *([] if job.split == "scaffold" else ["split"]))
    if is_url(job.source):
        parameters["source"] = redact_url(job.source)
    for task in tasks:
        file = _file_name(job, task, files[task])
        with stage_output(
            Path(job.output) / task, "moleculenet", {**parameters, "task": task}, SPLITS,
            sources=[expected_source(job.source, file)], force=job.force,
        ) as output:  # fmt: skip
            if output is not None:
                _prepare_task(job, task, file, output)


def _file_name(job: MoleculeNetJob, task: str, file: str) -> str:
    """Return the name of a task's file: MoleculeNet's or, in a directory, also that of the task."""
    is_named_after_task = not is_url(job.source) and Path(job.source, f"{task}.csv").is_file()
    return f"{task}.csv" if is_named_after_task else file


def _prepare_task(job: MoleculeNetJob, task: str, file: str, output: StagedOutput) -> None:
    path, source = locate(job.source, file, Path(job.output) / "raw")
    counts = output.add_counts(task, *SPLITS)
    table = parse_table(io.BytesIO(read_input(path, source, output)), source, ",")
    if not table.rows:
        raise UserError(f"{source} contains no rows: download it again")
    names = [name.strip().lower() for name in table.columns]
    if "smiles" not in names:
        raise UserError(
            f"{source}:1: no column smiles, only {', '.join(table.columns)}: rename the column of molecules"
        )
    column = names.index("smiles")
    kept: list[list[str]] = []
    molecules: list[str] = []  # canonical SMILES of each
    for location, row in zip(table.locations, table.rows, strict=True):
        counts.read += 1
        if (canonical := canonical_smiles(row[column])) is not None:
            kept.append(row)
            molecules.append(canonical)
        elif job.on_invalid == "skip":
            counts.drop("invalid SMILES")
        else:
            raise UserError(
                f"{location}: RDKit cannot read the SMILES {row[column]!r}: correct it, or set on_invalid=skip"
            )
    sizes = split_sizes(
        len(kept), SplitSizes(val_size=job.val_size, test_size=job.test_size, seed=job.seed, num_csv_files=1)
    )
    divided = _by_scaffold(kept, column, sizes) if job.split == "scaffold" else _at_random(molecules, sizes, job.seed)
    for split, rows in divided.items():
        if rows:
            counts.written += output.write_csv(f"{split}/x000.csv", table.columns, (kept[row] for row in rows))


def _at_random(molecules: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Divide the rows of these molecules at random, as BioNeMo v1 does, but rows of the same molecule together.

    A split has at least its size, up to the last split, which has the remaining rows.
    """
    order = np.arange(len(molecules))
    np.random.default_rng(seed).shuffle(order)
    groups: dict[str, list[int]] = defaultdict(list)
    for row in order.tolist():
        groups[molecules[row]].append(row)
    ends = np.cumsum([*sizes.values()])
    splits: dict[str, list[int]] = {split: [] for split in sizes}
    placed = 0
    for group in groups.values():
        splits[list(sizes)[int(np.searchsorted(ends, placed, "right"))]] += group
        placed += len(group)
    return splits


def _by_scaffold(rows: Sequence[Sequence[str]], column: int, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    shares = [sizes[split] / len(rows) for split in ("val", "test")]
    found = divide_by_scaffold([row[column].strip() for row in rows], *shares)
    return {split: [row for row, each in enumerate(found) if each == split] for split in sizes}
