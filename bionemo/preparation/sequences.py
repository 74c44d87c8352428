# SPDX-License-Identifier: Apache-2.0
"""FASTA or CSV files, of UniRef50 or anything else, to `{train,val,test}/x000.csv ...`."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import SequencesJob, Size, SplitSizes
from bionemo.preparation.addresses import described, public
from bionemo.preparation.checksums import OutputFile, measure
from bionemo.preparation.chunks import Columns, Stretch, count, cut, is_fasta
from bionemo.preparation.download import fetch
from bionemo.preparation.inputs import is_gzipped, note_dropped_columns, unzipped
from bionemo.preparation.pool import pool
from bionemo.preparation.progress import progress
from bionemo.preparation.records import csv_columns
from bionemo.preparation.shards import ByNumber, deal
from bionemo.preparation.writer import Draft, draft

SPLITS = ("val", "test", "train")  # in this order v1 takes them from its shuffled list
_NOT_PARAMETERS = ("_target_", "output", "force", "num_preprocess_workers", "source", "checksum")


def prepare(job: SequencesJob) -> None:
    """Shuffle the records and deal them to validation, test and training.

    Raises:
        UserError: for an input that cannot be had or read, for a record that a policy calls an error, and for sizes
            that leave nothing to train on.
    """
    sources = [job.source] if isinstance(job.source, str) else job.source
    if job.checksum and len(sources) > 1:
        raise UserError(f"checksum belongs to one file, but source names {len(sources)}: leave it out")
    parameters = {key: value for key, value in asdict(job).items() if key not in _NOT_PARAMETERS}
    names = [described(source) for source in sources]
    with draft(job.output, "sequences", parameters, SPLITS, sources=names, force=job.force) as made:
        if made is None:
            return
        raw = Path(job.output) / "raw"
        paths = [fetch(source, raw, job.checksum if len(sources) == 1 else None) for source in sources]
        columns = Columns(job.id_column, job.sequence_column, job.separator)
        with pool(job.num_preprocess_workers) as workers:
            sums = measured(workers, paths)
            stretches = [
                stretch
                for path, source in zip(paths, sources, strict=True)
                for stretch in stretches_of(path, public(source), made, columns, job.format)
            ]
            stretches = count(workers, stretches)
            total = sum(stretch.records for stretch in stretches)

            def arrange(left_out: NDArray[np.int64]) -> tuple[ByNumber, Sequence[tuple[str, int]]]:
                return _shuffled(made.scratch / "rows", total, left_out, job)

            label = Path(public(sources[0])).name if len(sources) == 1 else f"{len(sources)} files"
            deal(made, workers, label, stretches, job, arrange, SPLITS)
            for name, path, future in zip(names, paths, sums, strict=True):
                made.add_input(name, path, future.result())


def measured(workers: Executor, paths: Sequence[Path]) -> list[Future[OutputFile]]:
    """Take the checksums of inputs, while other work goes on."""
    return [workers.submit(measure, path) for path in paths]


def stretches_of(path: Path, shown: str, made: Draft, columns: Columns | None, form: str = "fasta") -> list[Stretch]:
    """Cut an input into stretches, unzipped first if it is gzipped.

    Raises:
        UserError: an empty or damaged file.
    """
    path = plain(path, made)
    if is_fasta(path, shown, form):  # type: ignore[arg-type]
        columns = None
    stretches = cut(path, shown, columns)
    if columns:
        note_dropped_columns(shown, *csv_columns(path, shown, columns.name, columns.sequence, columns.separator))
    return stretches


def plain(path: Path, made: Draft) -> Path:
    """Give a file uncompressed: itself, or a copy in the scratch directory.

    Raises:
        UserError: damaged data.
    """
    if not is_gzipped(path):
        return path
    copy = made.scratch / f"{len(list(made.scratch.iterdir()))}.txt"
    with copy.open("wb") as file, progress(f"unzipping {path.name}", None) as advance:
        for block in unzipped(path):
            file.write(block)
            advance(len(block))
    return copy


def split_sizes(total: int, sizes: SplitSizes) -> dict[str, int]:
    """Records of each split: counts as they are, shares below 1 rounded to the nearest, but at least 1.

    Raises:
        UserError: when nothing is left to train on.
    """

    def records(size: Size) -> int:
        if isinstance(size, float) and size < 1:
            return max(int(size > 0), round(size * total)) if size >= 0 else -1
        return int(size)

    val, test = records(sizes.val_size), records(sizes.test_size)
    if min(val, test) < 0 or val + test >= total:
        raise UserError(
            f"val_size={sizes.val_size} and test_size={sizes.test_size} leave nothing of {total:,} records to train "
            "on: set smaller counts, or shares such as 0.01"
        )
    return {"val": val, "test": test, "train": total - val - test}


def shard_sizes(directory: str, rows: int, files: int) -> list[tuple[str, int]]:
    """Names and rows of the shards of a split: as even as `np.array_split`, and none of them empty.

    Raises:
        UserError: no shards are wanted.
    """
    if files < 1:
        raise UserError(f"num_csv_files={files}: set at least 1")
    files = min(files, rows)
    return [(f"{directory}/x{i:03}.csv", rows // files + (i < rows % files)) for i in range(files)]


def _shuffled(
    path: Path, total: int, left_out: NDArray[np.int64], job: SequencesJob
) -> tuple[ByNumber, list[tuple[str, int]]]:
    """Place records as BioNeMo v1: a shuffled list, of which validation is the beginning, then test, then training."""
    order = np.delete(np.arange(total), left_out)
    np.random.default_rng(job.seed).shuffle(order)
    rows = np.full(total, -1)
    rows[order] = np.arange(len(order))
    path.write_bytes(rows.data)
    sizes = split_sizes(len(order), job)
    return ByNumber(path), [shard for name in SPLITS for shard in shard_sizes(name, sizes[name], job.num_csv_files)]
