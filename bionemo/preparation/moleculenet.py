# SPDX-License-Identifier: Apache-2.0
"""MoleculeNet's measured properties, ESOL, FreeSolv and Lipophilicity, to `<task>/{train,val,test}/x000.csv`."""

import csv
import io
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import MoleculeNetJob, SplitSizes
from bionemo.preparation.addresses import expected, is_url, public
from bionemo.preparation.download import Refused, locate
from bionemo.preparation.inputs import read_small
from bionemo.preparation.molecules import canonical_smiles
from bionemo.preparation.sequences import SPLITS, split_sizes
from bionemo.preparation.writer import Draft, draft

FILES = {"ESOL": "delaney-processed.csv", "FreeSolv": "SAMPL.csv", "Lipophilicity": "Lipophilicity.csv"}
_V1_NAMES = {
    "delaney-processed": "delaney-processed.csv",
    "SAMPL": "SAMPL.csv",
}  # BioNeMo v1 called tasks by their file
_NOT_PARAMETERS = ("_target_", "output", "force", "num_preprocess_workers", "source", "task_name")


def prepare(job: MoleculeNetJob) -> None:
    """Shuffle each task's rows, which stay as they are, and deal them to validation, test and training.

    Raises:
        UserError: for a task that is not known, a file that cannot be had or read, a SMILES that RDKit cannot read
            where that is an error, and sizes that leave nothing to train on.
    """
    names = (
        list(FILES) if job.task_name == "all" else [job.task_name] if isinstance(job.task_name, str) else job.task_name
    )
    files = FILES | _V1_NAMES
    for name in names:
        if name not in files:
            raise UserError(f"task_name={name} is not known: choose {', '.join(FILES)} or all")
    parameters = {key: value for key, value in asdict(job).items() if key not in _NOT_PARAMETERS}
    if is_url(job.source):
        parameters["source"] = public(job.source)
    for name in names:
        directory = Path(job.output) / name
        sources = _expected(job, name, files[name])
        settings = {**parameters, "task": name}
        with draft(directory, "moleculenet", settings, SPLITS, sources=sources, force=job.force) as made:
            if made is not None:
                _prepare(job, name, files[name], made)


def _found(job: MoleculeNetJob, task: str, file: str) -> tuple[Path, str]:
    """Find a task's file under MoleculeNet's name for it or the task's own."""
    raw, own = Path(job.output) / "raw", f"{task}.csv"
    if not is_url(job.source):
        file = own if Path(job.source, own).is_file() else file
        return locate(job.source, file, raw), file
    try:
        return locate(job.source, file, raw), file
    except Refused as refused:
        try:
            return locate(job.source, own, raw), own
        except Refused:
            raise refused from None


def _expected(job: MoleculeNetJob, task: str, file: str) -> list[str] | None:
    """The file of a task; None for a URL, below which it may have either name."""
    if is_url(job.source):
        return None
    return [expected(job.source, own if Path(job.source, own := f"{task}.csv").is_file() else file)]


def _prepare(job: MoleculeNetJob, task: str, file: str, made: Draft) -> None:
    path, file = _found(job, task, file)
    source = f"{public(job.source).rstrip('/')}/{file}" if is_url(job.source) else str(path)
    tally = made.tally(task, *SPLITS)
    header, rows = _table(read_small(path, made, source if is_url(job.source) else None), source)
    column = _smiles_column(header, source)
    kept: list[list[str]] = []
    for line, row in rows:
        tally.read += 1
        if canonical_smiles(row[column]) is not None:
            kept.append(row)
        elif job.on_invalid == "skip":
            tally.dropped["invalid SMILES"] = tally.dropped.get("invalid SMILES", 0) + 1
        else:
            raise UserError(
                f"{source}:{line}: RDKit cannot read the SMILES {row[column]!r}: correct it, or set on_invalid=skip"
            )

    order = np.arange(len(kept))
    np.random.default_rng(job.seed).shuffle(order)
    begin = 0
    dealt = SplitSizes(val_size=job.val_size, test_size=job.test_size, seed=job.seed, num_csv_files=1)
    for split, size in split_sizes(len(kept), dealt).items():
        if size:
            rows_of_split = (kept[index] for index in order[begin : begin + size])
            tally.written += made.write_csv(f"{split}/x000.csv", header, rows_of_split)
        begin += size


def _table(content: bytes, shown: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header and rows of a CSV file, each row with the number of the line where it ends.

    Raises:
        UserError: text that is not UTF-8, no rows, or a row with another number of fields than the header.
    """
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{shown} is not the CSV file it should be ({error}): download it again") from error
    if len(rows) < 2:
        raise UserError(f"{shown} holds no rows: download it again")
    (_, header), *rows = rows
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"{shown}:{line}: {len(row)} fields under a header of {len(header)}: correct the line")
    return header, rows


def _smiles_column(header: list[str], shown: str) -> int:
    for index, name in enumerate(header):
        if name.strip().lower() == "smiles":
            return index
    raise UserError(f"{shown}:1: no column smiles, only {', '.join(header)}: name the molecules' column so")
