# SPDX-License-Identifier: Apache-2.0
"""The splits of `preprocess split=similarity` with their report, and clusters of a file.

Distinct sequences are numbered in the order of their hashes, so that the result does not depend on the order of the
records.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.figures import new_figure, render
from bionemo.config.schema.preparation import SequencesJob
from bionemo.data.proteins.similarity import HELD_OUT, RelativeSearch, describe_coverage, divide_records, join_clusters
from bionemo.preparation.chunks import Chunk
from bionemo.preparation.name_index import NameIndex, find_duplicates, hash_names
from bionemo.preparation.shards import read_record, read_strings
from bionemo.preparation.staged_output import StagedOutput

log = logging.getLogger(__name__)


def read_clusters(
    path: Path, index: Path, name_hashes: Sequence[Path], sequence_of: NDArray[np.int64], chunks: Sequence[Chunk]
) -> NDArray[np.int64]:
    """Read a file of clusters: lines of a representative, a tab and a member, which are names of records.

    Members that are no records are ignored.

    Args:
        path: the file.
        index: directory of an index of names, which is written.
        name_hashes: files of the hashes of the names of the records.
        sequence_of: number of the sequence of each record, or -1; int64 [records].
        chunks: parts of the input, for messages.

    Returns:
        The lowest number of a sequence in the cluster of each sequence, int64 [n].

    Raises:
        UserError: if the file cannot be read, or does not contain all sequences.
    """
    names = NameIndex.build(index, name_hashes, len(sequence_of))
    columns = ["representative", "member"]
    options = [
        pyarrow.csv.ReadOptions(column_names=columns),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.binary())),
    ]
    try:
        with pyarrow.csv.open_csv(path, *options) as reader:
            parts = [(hash_names(batch[0])[:, 0], names.lookup(hash_names(batch[1]))) for batch in reader]
    except pa.ArrowInvalid as error:
        text = " ".join(str(error).split())
        raise UserError(f"{path}: {text}: each line must be a representative, a tab and a member") from error
    keys, records = (np.concatenate(part) for part in zip(*parts, strict=True))
    members = np.where(records < 0, -1, sequence_of[records])
    if len(missing := np.flatnonzero(~np.isin(sequence_of, np.append(members, -1)))):
        found, row = read_record(chunks, int(missing[0]))
        short = "; MMseqs2 shortens sp|P12345|NAME to P12345" if b"|" in found.names[row].as_py() else ""
        raise found.error(
            row,
            f"is in no cluster of {path} ({len(missing):,} such records): add it as a member, with this name{short}",
        )
    members, keys = members[members >= 0], keys[members >= 0]
    _, first, cluster = np.unique(keys, return_index=True, return_inverse=True)
    return join_clusters(np.arange(sequence_of.max() + 1), np.column_stack([members, members[first[cluster]]]))


def shuffle_kept(total: int, excluded: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the indices of the records that are not excluded, in the order of BioNeMo v1."""
    order = np.delete(np.arange(total), excluded)
    np.random.default_rng(seed).shuffle(order)
    return order


def split_by_similarity(
    output: StagedOutput,
    workers: Executor,
    chunks: Sequence[Chunk],
    job: SequencesJob,
    excluded: NDArray[np.int64],
    hash_files: Mapping[str, Sequence[Path]],
    sizes: Mapping[str, int],
) -> NDArray[np.int8]:
    """Assign records to splits, and add a report, with a plot if matplotlib is installed, to the output.

    Args:
        output: the output.
        workers: processes that read the records.
        chunks: parts of the input.
        job: settings.
        excluded: records that are dropped.
        hash_files: files of the hashes of `names` and `sequences`.
        sizes: records of each split.

    Returns:
        The number of the split of each record, int8.

    Raises:
        UserError: if `cluster_tsv` cannot be read or lacks a record, or MMseqs2 fails.
    """
    directory, total = output.scratch / "similarity", sum(chunk.num_records for chunk in chunks)
    directory.mkdir()
    order = shuffle_kept(total, excluded, job.seed)  # begins with the held-out records of a random split
    repeated, first = find_duplicates(hash_files["sequences"], total, excluded)
    distinct = np.setdiff1d(order, repeated)
    hashes = np.concatenate([np.fromfile(path, np.uint64)[::2] for path in hash_files["sequences"]])
    places, sequence_of = np.argsort(hashes[distinct], kind="stable"), np.full(total, -1)
    sequence_of[distinct[places]] = np.arange(len(distinct))
    sequence_of[repeated] = sequence_of[first]
    texts = read_strings(directory / "texts", workers, chunks, job, "sequences", distinct)
    threads = max(1, min(job.num_preprocess_workers, os.cpu_count() or 1))
    search = RelativeSearch(directory, texts, places, job.min_seq_id, job.coverage, threads)
    initial = (
        read_clusters(Path(job.cluster_tsv), directory / "index", hash_files["names"], sequence_of, chunks)
        if job.cluster_tsv
        else search.cluster()
    )
    requested = [sizes[split] for split in HELD_OUT]
    at_random = order[: sum(requested)]
    division = divide_records(search, initial, sequence_of, at_random, requested, job.seed)
    output.manifest.similarity = division.report
    log.info("%s", division.notes[0])
    for note in division.notes[1:]:
        log.warning("note: %s", note)
    record_of = np.append(distinct[places], -1)  # of a sequence
    nearest = record_of[division.nearest]
    numbers = np.union1d(division.held_out, nearest[nearest >= 0])
    texts = read_strings(directory / "names", workers, chunks, job, "names", numbers)
    names = dict(zip(numbers.tolist(), (text.as_py().decode() for text in texts), strict=True)) | {-1: ""}
    columns = (
        (names[record] for record in division.held_out.tolist()),
        (HELD_OUT[each] for each in division.splits[division.held_out].tolist()),
        map("{:.3f}".format, division.identities[0]),
        (names[record] for record in nearest.tolist()),
    )
    output.write_csv("similarity.csv", ("record_name", "split", "identity", "nearest"), zip(*columns, strict=True))
    if find_spec("matplotlib"):
        for suffix in (".png", ".svg"):
            output.write(f"similarity{suffix}", _plot(division.identities, job.min_seq_id, job.coverage, suffix))
    return division.splits


def _plot(identities: list[NDArray[np.float64]], threshold: float, coverage: float, suffix: str) -> bytes:
    with new_figure(3.5, 2.6) as figure:
        axes = figure.subplots()
        found = [100 * np.where(each > 0, each, -0.1) for each in identities]  # 0: no hit
        labels = [
            f"{name} split (n = {len(each):,})" for name, each in zip(("similarity", "random"), found, strict=True)
        ]
        axes.hist(found, [-15, -5, *range(0, 105, 5)], label=labels)
        axes.axvline(
            100 * threshold, color="black", linestyle="--", linewidth=0.8, label=f"threshold, {100 * threshold:g} %"
        )
        axes.set_xticks([-10, *range(0, 101, 20)], ["no hit", *map(str, range(0, 101, 20))])
        axes.set(
            xlabel=f"identity {describe_coverage(coverage)}\nto the nearest training sequence, %",
            ylabel="held-out sequences",
        )
        axes.locator_params(axis="y", integer=True)
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1)
        return render(figure, suffix)
