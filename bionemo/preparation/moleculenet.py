# SPDX-License-Identifier: Apache-2.0
"""Prepare the MoleculeNet tasks ESOL, FreeSolv and Lipophilicity as `<task>/{train,val,test}/x000.csv`."""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import MoleculeNetJob
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.data.table import parse_table
from bionemo.preparation.inputs import read_input, resolve_tasks
from bionemo.preparation.molecules import canonical_smiles
from bionemo.preparation.sequences import SPLITS, split_sizes
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import absolute_source, find_source, is_url, redact_url

FILES = {"ESOL": "delaney-processed.csv", "FreeSolv": "SAMPL.csv", "Lipophilicity": "Lipophilicity.csv"}
_V1_TASKS = {"delaney-processed": "delaney-processed.csv", "SAMPL": "SAMPL.csv"}  # BioNeMo v1 used file names


def prepare(job: MoleculeNetJob) -> None:
    """Distribute the rows of each task, unchanged, to validation, test and training, at random or by scaffold.

    Rows of the same molecule are in the same split.

    Raises:
        UserError: if a task is unknown, a file cannot be read or downloaded, a SMILES is invalid and its policy is
            `error`, or the split sizes leave no training rows.
    """
    files = FILES | _V1_TASKS
    tasks = resolve_tasks(job.task_name, FILES, _V1_TASKS)
    # data sets prepared before the option existed were divided at random
    parameters = result_parameters(job, "task_name", *([] if job.split == "scaffold" else ["split"]))
    if is_url(job.source):
        parameters["source"] = redact_url(job.source)
    for task in tasks:
        source = find_source(job.source, f"{task}.csv")
        if is_url(source) or not Path(source).is_file():
            source = find_source(job.source, files[task])
        with stage_output(
            Path(job.output) / task, "moleculenet", {**parameters, "task": task}, SPLITS,
            sources=[absolute_source(source)], force=job.force,
        ) as output:  # fmt: skip
            if output is not None:
                _prepare_task(job, task, source, output)


def _prepare_task(job: MoleculeNetJob, task: str, source: str, output: StagedOutput) -> None:
    counts = output.add_counts(task, *SPLITS)
    _, content = read_input(source, Path(job.output) / "raw", output)
    table = parse_table(io.BytesIO(content), redact_url(source), ",")
    if not table.rows:
        raise UserError(f"{table.path} contains no rows: download it again")
    names = [name.strip().lower() for name in table.columns]
    if "smiles" not in names:
        raise UserError(
            f"{table.path}:1: no column smiles, only {', '.join(table.columns)}: rename the column of molecules"
        )
    column = names.index("smiles")
    counts.read = len(table.rows)
    kept: list[list[str]] = []
    molecules: list[str] = []  # canonical SMILES of each
    for location, row in zip(table.locations, table.rows, strict=True):
        if (canonical := canonical_smiles(row[column])) is not None:
            kept.append(row)
            molecules.append(canonical)
        elif job.on_invalid == "skip":
            counts.drop("invalid SMILES")
        else:
            raise UserError(
                f"{location}: RDKit cannot read the SMILES {row[column]!r}: correct it, or set on_invalid=skip"
            )
    sizes = split_sizes(len(kept), job.val_size, job.test_size)
    if job.split == "scaffold":
        shares = [sizes[split] / len(kept) for split in ("val", "test")]
        found = divide_by_scaffold([row[column].strip() for row in kept], *shares)
        divided = {split: [row for row, each in enumerate(found) if each == split] for split in sizes}
    else:
        divided = _at_random(molecules, sizes, job.seed)
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
