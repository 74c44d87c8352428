# SPDX-License-Identifier: Apache-2.0
"""Prepare FASTA or CSV files of protein sequences, such as UniRef50, as `{train,val,test}/x000.csv ...`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import SequencesJob, Size
from bionemo.data.proteins.similarity import run_mmseqs
from bionemo.preparation.chunks import Chunk, count_records, is_fasta, split_into_chunks
from bionemo.preparation.download import fetch
from bionemo.preparation.inputs import is_gzipped, read_gzip
from bionemo.preparation.manifest import checksum_file
from bionemo.preparation.pool import worker_pool
from bionemo.preparation.records import InputColumns
from bionemo.preparation.shards import RowAssignment, write_shards
from bionemo.preparation.similarity import shuffle_kept, split_by_similarity
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import absolute_source, redact_url

SPLITS = ("val", "test", "train")  # in the order in which BioNeMo v1 takes them from its shuffled list


def prepare(job: SequencesJob) -> None:
    """Shuffle the records and distribute them to validation, test and training.

    Raises:
        UserError: if an input cannot be read or downloaded, a record is invalid and its policy is `error`, or the
            split sizes leave no training records.
    """
    sources = [job.source] if isinstance(job.source, str) else job.source
    if job.checksum and len(sources) > 1:
        raise UserError(f"checksum applies to a single file, but source has {len(sources)} files: remove it")
    similar, clusters = job.split == "similarity", [job.cluster_tsv] if job.cluster_tsv else []
    if clusters and not similar:
        raise UserError("cluster_tsv has no effect with split=random: set split=similarity, or remove it")
    if clusters and not Path(clusters[0]).is_file():
        raise UserError(f"cluster_tsv: there is no file {clusters[0]}: check the path")
    # settings without effect are left out, as in manifests of earlier versions
    unused = [] if similar else ["split", "min_seq_id", "coverage"]
    unused += [key for key, old in {"duplicates": "keep", "output_format": "csv"}.items() if getattr(job, key) == old]
    parameters = result_parameters(job, "checksum", "cluster_tsv", *unused)
    names = [absolute_source(source) for source in (*sources, *clusters)]
    with stage_output(job.output, "sequences", parameters, SPLITS, sources=names, force=job.force) as output:
        if output is None:
            return
        if similar:
            run_mmseqs("version")  # an error now if it is not installed, not after reading
        paths = [fetch(source, Path(job.output) / "raw", job.checksum) for source in sources]
        inputs = [*zip(sources, paths, strict=True), *((each, Path(each)) for each in clusters)]
        columns = InputColumns(job.id_column, job.sequence_column, job.separator)
        with worker_pool(job) as workers:
            checksums = [workers.submit(checksum_file, path) for _, path in inputs]
            chunks: list[Chunk] = []
            for path, source in zip(paths, sources, strict=True):
                plain, display_path = decompress(path, output), redact_url(source)
                is_table = not is_fasta(plain, display_path, job.format)
                chunks += split_into_chunks(
                    plain, display_path, columns.resolve(plain, display_path) if is_table else None
                )
            chunks = count_records(workers, chunks)
            total = sum(chunk.num_records for chunk in chunks)

            splits = np.full(total, -1, np.int8)

            def divide(excluded: NDArray[np.int64], hash_files: Mapping[str, Sequence[Path]]) -> None:
                sizes = split_sizes(total - len(excluded), job.val_size, job.test_size)
                splits[:] = split_by_similarity(output, workers, chunks, job, excluded, hash_files, sizes)

            assign_rows = partial(_assign_rows, output.scratch / "rows", job, splits)
            label = Path(redact_url(sources[0])).name if len(sources) == 1 else f"{len(sources)} files"
            write_shards(
                output,
                workers,
                label,
                chunks,
                job,
                assign_rows,
                SPLITS,
                identical=job.duplicates,
                divide=divide if similar else None,
            )
            for (source, path), future in zip(inputs, checksums, strict=True):
                output.add_input(path, redact_url(source), future.result())


def decompress(path: Path, output: StagedOutput) -> Path:
    """Return the path of a plain file, or write a gzipped one uncompressed to the scratch directory.

    Raises:
        UserError: if the file is damaged.
    """
    if not is_gzipped(path):
        return path
    copy = output.scratch / f"{len(list(output.scratch.iterdir()))}.txt"
    with copy.open("wb") as file, progress(f"unzipping {path.name}", None) as advance:
        for block in read_gzip(path):
            file.write(block)
            advance(len(block))
    return copy


def split_sizes(total: int, val_size: Size, test_size: Size) -> dict[str, int]:
    """Return the number of records of each split. Shares below 1 are rounded to the nearest count, but at least 1.

    Raises:
        UserError: if no training records are left.
    """

    def num_records(size: Size) -> int:
        if isinstance(size, float) and size < 1:
            return max(int(size > 0), round(size * total)) if size >= 0 else -1
        return int(size)

    val, test = num_records(val_size), num_records(test_size)
    if min(val, test) < 0 or val + test >= total:
        raise UserError(
            f"val_size={val_size} and test_size={test_size} leave no training records of {total:,}: set "
            "smaller counts, or shares such as 0.01"
        )
    return {"val": val, "test": test, "train": total - val - test}


def shard_sizes(directory: str, rows: int, num_shards: int, extension: str = "csv") -> list[tuple[str, int]]:
    """Return names and numbers of rows of the shards of a split: as `np.array_split`, without empty shards."""
    num_shards = min(num_shards, rows)
    names = (f"{directory}/x{i:03}.{extension}" for i in range(num_shards))
    return [(name, rows // num_shards + (i < rows % num_shards)) for i, name in enumerate(names)]


def _assign_rows(
    path: Path, job: SequencesJob, splits: NDArray[np.int8], excluded: NDArray[np.int64]
) -> tuple[RowAssignment, list[tuple[str, int]]]:
    """Assign rows as in BioNeMo v1: the beginning of a shuffled list is validation, then test, then training.

    `splits` are the numbers of the splits of the records, int8 [n], or -1 for a random split.
    """
    order = shuffle_kept(len(splits), excluded, job.seed)
    sizes = split_sizes(len(order), job.val_size, job.test_size)
    if splits.max(initial=-1) >= 0:
        order = order[np.argsort(splits[order], kind="stable")]
        sizes = {split: int((splits[order] == number).sum()) for number, split in enumerate(SPLITS)}
    rows = np.full(len(splits), -1)
    rows[order] = np.arange(len(order))
    path.write_bytes(rows.data)
    shards = [
        shard for split in SPLITS for shard in shard_sizes(split, sizes[split], job.num_csv_files, job.output_format)
    ]
    return RowAssignment(path), shards
