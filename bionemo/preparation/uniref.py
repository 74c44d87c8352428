# SPDX-License-Identifier: Apache-2.0
"""Prepare UniRef50 clusters with their UniRef90 members for ESM-2: `uf50/{train,val,test}` and `uf90/uf90_csvs`.

Training draws a cluster, then one of its members. Both are written in the order of the mapping, not of the FASTA
files: cluster c is row c of `uf50/train`, and its members are the rows starts[c] to starts[c] + counts[c] of the
UniRef90 shards. `starts.mmap` and `counts.mmap` (uint64, as in BioNeMo v1) are in `uf50/train`.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.config.schema.preparation import ClustersJob, Strictness
from bionemo.preparation.chunks import Chunk, count_records, find_bounds, split_into_chunks
from bionemo.preparation.manifest import checksum_file
from bionemo.preparation.name_index import NameIndex, find_duplicates, hash_names
from bionemo.preparation.pool import worker_pool
from bionemo.preparation.sequences import decompress, shard_sizes
from bionemo.preparation.shards import RowAssignment, write_consecutive_rows, write_shards
from bionemo.preparation.staged_output import StagedOutput, stage_output

_FILES = ("uf50_datapath", "val_datapath", "test_datapath", "uf90_datapath", "cluster_mapping_tsv")
_V1_MAPPING = "uniref50_mapper_to_uniref90clustermembers_andselfuniref50.tsv"
_PARAMETERS = ("num_csv_files", "on_empty", "on_duplicate", "on_letters", "on_unknown", "on_shared")
EntryType = Literal["cluster", "member"]


@dataclass
class ClusterMapping:
    """Clusters and members, and whether each is kept. The table has m members in total."""

    path: Path  # the table, uncompressed
    display_path: str  # path of the table, for messages
    counts: NDArray[np.int64]  # [clusters], number of members per cluster in the table
    # bool [clusters] for "cluster", bool [m] in the order of the table for "member"
    keep: dict[EntryType, NDArray[np.bool_]]
    scratch: Path  # directory of the name indexes

    @classmethod
    def read(
        cls, path: Path, display_path: str, scratch: Path, workers: Executor, on_shared: Strictness
    ) -> "ClusterMapping":
        """Read the table.

        Raises:
            UserError: if a line has no members, or a cluster or member occurs twice and `on_shared` is `error`.
        """
        scratch.mkdir()
        with path.open("rb") as file:
            # below the header; the names of a part take ten times its size
            bounds = find_bounds(path, len(file.readline()), parts=16)
        chunks = range(len(bounds) - 1)
        task = partial(_write_hashes, path, display_path, scratch)
        results = workers.map(task, bounds[:-1], bounds[1:], chunks)
        counts = np.concatenate([np.zeros(0, np.int64), *results])
        if not len(counts):
            raise UserError(f"{display_path} contains no cluster below its header: download it again")
        keep: dict[EntryType, NDArray[np.bool_]] = {
            "cluster": np.ones(len(counts), bool),
            "member": np.ones(int(counts.sum()), bool),
        }
        mapping = cls(path, display_path, counts, keep, scratch)
        for entry_type, kept in keep.items():
            hash_files = [scratch / f"{index:06}.{entry_type}" for index in chunks]
            repeated, first = find_duplicates(hash_files, len(kept))
            if len(repeated) and on_shared == "error":
                earlier, later = (mapping.describe(entry_type, int(number)) for number in (first[0], repeated[0]))
                raise UserError(
                    f"{later}, which is also at {earlier.partition(': ')[0]} ({len(repeated):,} such "
                    f"{entry_type}s): correct the table, or set on_shared=skip (keeps the first)"
                )
            kept[repeated] = False
            NameIndex.build(mapping.index_path(entry_type), hash_files, len(kept))
        mapping.drop_orphans()
        return mapping

    def index_path(self, entry_type: EntryType) -> Path:
        """Return the file of the name index of clusters or members."""
        return self.scratch / f"{entry_type}s.npy"

    def drop_orphans(self) -> NDArray[np.int64]:
        """Drop members of dropped clusters, and clusters without members; return members per cluster, [clusters]."""
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        self.keep["member"] &= self.keep["cluster"][owner]
        counts = np.bincount(owner, weights=self.keep["member"], minlength=len(self.counts)).astype(np.int64)
        self.keep["cluster"] &= counts > 0
        return counts

    def describe(self, entry_type: EntryType, number: int) -> str:
        """Return file, line and name of a cluster or member, for messages; the table is read again."""
        cluster = number
        if entry_type == "member":
            cluster = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        line, text = next(islice(_nonblank_lines(self.path), cluster, None))
        name, members = text.decode(errors="replace").rstrip("\r\n").split("\t")[:2]
        if entry_type == "member":
            name += f" has the member {[*filter(None, members.split(','))][number - self.counts[:cluster].sum()]}"
        return f"{self.display_path}:{line}: cluster {name}"


def _write_hashes(
    path: Path, display_path: str, scratch: Path, start: int, stop: int, index: int
) -> NDArray[np.int64]:
    """Write the hashes of a chunk's clusters and members; return the number of members per cluster, int64 [n]."""
    with path.open("rb") as file:
        data = os.pread(file.fileno(), stop - start, start).replace(b"\r\n", b"\n")
    lines = pc.split_pattern(pa.array([data]), "\n").flatten()
    fields = pc.split_pattern(lines.filter(pc.greater(pc.binary_length(lines), 0)), "\t", max_splits=2)
    if pc.less(pc.list_value_length(fields), 2).true_count:
        line, found = next((number, text) for number, text in _nonblank_lines(path) if b"\t" not in text)
        wrong = found.strip().decode(errors="replace")[:60]
        raise UserError(
            f"{display_path}:{line}: no tab in {wrong!r}: expected cluster name, tab, comma-separated members"
        )
    members = pc.split_pattern(pc.list_element(fields, 1), ",")
    is_named = pc.greater(pc.binary_length(members.flatten()), 0)  # ignore empty members between two commas
    owner = pc.list_parent_indices(members).filter(is_named)
    names = {"cluster": pc.list_element(fields, 0), "member": members.flatten().filter(is_named)}
    for entry_type, each in names.items():
        with replacing(scratch / f"{index:06}.{entry_type}", durable=False) as new:
            new.write_bytes(hash_names(each).data)
    return np.bincount(owner, minlength=len(fields))


def _nonblank_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines below the header with their line numbers from 1, for messages."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if number > 1 and line.strip(b"\r\n"))


def prepare(job: ClustersJob) -> None:
    """Write the clusters, their members and the held-out splits.

    Raises:
        UserError: if a file is missing or cannot be read, or data is invalid and its policy is `error`.
    """
    parameters = {key: getattr(job, key) for key in _PARAMETERS}
    custom = {split: Path(path) for split, path in sorted(job.custom_pretraining_fasta_path.items()) if path}
    if custom:
        name, parameters["splits"], directories = "own sequences", list(custom), list(custom)
        inputs = {f"{split}.custom_pretraining_fasta_path": path for split, path in custom.items()}
    else:
        name, directories = "clusters", ["uf50", "uf90"]
        inputs = {key: Path(getattr(job, key)) for key in _FILES}
        if inputs["uf50_datapath"].name == inputs["uf90_datapath"].name:  # record counts are listed by name
            raise UserError(f"{job.uf50_datapath} and {job.uf90_datapath} have the same name: rename one")
        table = inputs["cluster_mapping_tsv"]
        if not table.is_file() and table.with_name(_V1_MAPPING).is_file():
            inputs["cluster_mapping_tsv"] = table.with_name(_V1_MAPPING)
    paths = list(dict.fromkeys(inputs.values()))
    with stage_output(
        job.output, name, parameters, directories, sources=[*map(os.path.abspath, paths)], force=job.force
    ) as output:
        if output is None:
            return
        for key, path in inputs.items():
            if not path.is_file():
                raise UserError(f"{key}: there is no file {path}: download it, or set {key} to its path")
        with worker_pool(job) as workers:
            checksums = [workers.submit(checksum_file, path) for path in paths]
            writer = _Writer(job, output, workers)
            if custom:
                for split, path in custom.items():
                    writer.write_in_input_order(path, split)
            else:
                table, scratch = inputs["cluster_mapping_tsv"], output.scratch / "mapping"
                mapping = ClusterMapping.read(decompress(table, output), str(table), scratch, workers, job.on_shared)
                writer.write_clusters(mapping)
                for split in ("val", "test"):
                    writer.write_in_input_order(inputs[f"{split}_datapath"], f"uf50/{split}")
            for path, checksum in zip(paths, checksums, strict=True):
                output.add_input(path, str(path), checksum.result())


@dataclass(frozen=True)
class _Writer:
    """Writes the splits of a job."""

    job: ClustersJob
    output: StagedOutput
    workers: Executor

    def write_in_input_order(self, path: Path, directory: str) -> None:
        """Write the sequences of a FASTA file in their order."""
        chunks = self._read_chunks(path)
        total = sum(chunk.num_records for chunk in chunks)

        def assign_rows(excluded: NDArray[np.int64]) -> tuple[RowAssignment, Sequence[tuple[str, int]]]:
            kept = np.ones(total, bool)
            kept[excluded] = False
            rows = write_consecutive_rows(self.output.scratch / "in_order.rows", kept)
            return RowAssignment(rows), shard_sizes(directory, total - len(excluded), self.job.num_csv_files)

        label = f"{path.name} for {directory}"
        write_shards(self.output, self.workers, label, chunks, self.job, assign_rows, [directory])

    def write_clusters(self, mapping: ClusterMapping) -> None:
        """Write clusters and members in the order of the mapping, and the first row and number of their members."""
        uf50, uf90 = Path(self.job.uf50_datapath), Path(self.job.uf90_datapath)
        if self.job.on_unknown == "error" and not mapping.counts.all():
            cluster = mapping.describe("cluster", int(np.flatnonzero(mapping.counts == 0)[0]))
            raise UserError(f"{cluster} has no members: correct the table, or set on_unknown=skip")
        directory, manifest = "uf50/train", self.output.manifest
        self._write_by_name(mapping, "cluster", uf50, directory)
        mapping.drop_orphans()
        self._write_by_name(mapping, "member", uf90, "uf90/uf90_csvs")
        counts = mapping.drop_orphans()[mapping.keep["cluster"]]
        if not len(counts):
            raise UserError(
                f"no cluster of {mapping.display_path} has a sequence in {uf50} and a member in {uf90}: check "
                "the files"
            )
        if manifest.tallies[uf50.name].written != len(counts):  # some clusters have lost all their members
            shutil.rmtree(self.output.directory / directory)
            manifest.files = {
                name: file for name, file in manifest.files.items() if not name.startswith(f"{directory}/")
            }
            self._write_by_name(mapping, "cluster", uf50, directory)
        for name, content in (("counts", counts), ("starts", np.cumsum(counts) - counts)):
            self.output.write(f"{directory}/{name}.mmap", content.astype(np.uint64).tobytes())

    def _write_by_name(self, mapping: ClusterMapping, entry_type: EntryType, path: Path, directory: str) -> None:
        """Write the sequences of a FASTA file in the order of the mapping, and drop entries without a sequence."""
        kept = mapping.keep[entry_type]

        def assign_rows(excluded: NDArray[np.int64]) -> tuple[RowAssignment, Sequence[tuple[str, int]]]:
            rows = write_consecutive_rows(self.output.scratch / f"{entry_type}.rows", kept)
            sizes = shard_sizes(directory, int(kept.sum()), self.job.num_csv_files)
            return RowAssignment(rows, mapping.index_path(entry_type)), sizes

        def exclude_rows(rows: NDArray[np.int64]) -> None:
            missing = np.flatnonzero(kept)[rows]
            if self.job.on_unknown == "error":
                raise UserError(
                    f"{mapping.describe(entry_type, int(missing[0]))}, which is missing in {path} ({len(missing):,} "
                    f"such {entry_type}s): use the sequence file that belongs to the table, or set on_unknown=skip"
                )
            kept[missing] = False

        chunks = self._read_chunks(path)
        write_shards(self.output, self.workers, path.name, chunks, self.job, assign_rows, [directory], exclude_rows)
        changed = self.output.manifest.tallies[path.name].changed
        changed[f"{entry_type}s of the table excluded"] = int((~kept).sum())

    def _read_chunks(self, path: Path) -> list[Chunk]:
        chunks = split_into_chunks(decompress(path, self.output), str(path), None)
        return count_records(self.workers, chunks)
