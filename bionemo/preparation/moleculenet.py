# SPDX-License-Identifier: Apache-2.0
"""Prepare the MoleculeNet tasks ESOL, FreeSolv and Lipophilicity as `<task>/{train,val,test}/x000.csv`."""

import io
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import MoleculeNetJob, SplitSizes
from bionemo.data.table import parse_table
from bionemo.preparation.download import RefusedError, locate
from bionemo.preparation.inputs import read_input
from bionemo.preparation.molecules import canonical_smiles
from bionemo.preparation.sequences import SPLITS, split_sizes
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import expected_source, is_url, redact_url

FILES = {"ESOL": "delaney-processed.csv", "FreeSolv": "SAMPL.csv", "Lipophilicity": "Lipophilicity.csv"}
_V1_TASKS = {"delaney-processed": "delaney-processed.csv", "SAMPL": "SAMPL.csv"}  # BioNeMo v1 used file names


def prepare(job: MoleculeNetJob) -> None:
    """Shuffle the rows of each task and distribute them, unchanged, to validation, test and training.

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
    parameters = result_parameters(job, "task_name")
    if is_url(job.source):
        parameters["source"] = redact_url(job.source)
    for task in tasks:
        sources = None  # at a URL, the file may have either name
        if not is_url(job.source):
            sources = [expected_source(job.source, _local_file_name(job, task, files[task]))]
        with stage_output(
            Path(job.output) / task, "moleculenet", {**parameters, "task": task}, SPLITS,
            sources=sources, force=job.force,
        ) as output:  # fmt: skip
            if output is not None:
                _prepare_task(job, task, files[task], output)


def _local_file_name(job: MoleculeNetJob, task: str, file: str) -> str:
    return f"{task}.csv" if Path(job.source, f"{task}.csv").is_file() else file


def _locate_task(job: MoleculeNetJob, task: str, file: str) -> tuple[Path, str]:
    """Find the file of a task, with MoleculeNet's file name or that of the task; see `locate`."""
    raw = Path(job.output) / "raw"
    if not is_url(job.source):
        return locate(job.source, _local_file_name(job, task, file), raw)
    try:
        return locate(job.source, file, raw)
    except RefusedError as refused:
        try:
            return locate(job.source, f"{task}.csv", raw)
        except RefusedError:
            raise refused from None


def _prepare_task(job: MoleculeNetJob, task: str, file: str, output: StagedOutput) -> None:
    path, source = _locate_task(job, task, file)
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
    for location, row in zip(table.locations, table.rows, strict=True):
        counts.read += 1
        if canonical_smiles(row[column]) is not None:
            kept.append(row)
        elif job.on_invalid == "skip":
            counts.drop("invalid SMILES")
        else:
            raise UserError(
                f"{location}: RDKit cannot read the SMILES {row[column]!r}: correct it, or set on_invalid=skip"
            )

    order = np.arange(len(kept))
    np.random.default_rng(job.seed).shuffle(order)
    begin = 0
    sizes = SplitSizes(val_size=job.val_size, test_size=job.test_size, seed=job.seed, num_csv_files=1)
    for split, size in split_sizes(len(kept), sizes).items():
        if size:
            rows_of_split = (kept[index] for index in order[begin : begin + size])
            counts.written += output.write_csv(f"{split}/x000.csv", table.columns, rows_of_split)
        begin += size
