# SPDX-License-Identifier: Apache-2.0
"""Prepare UniRef50 clusters with their UniRef90 members for ESM-2: `uf50/{train,val,test}` and `uf90/uf90_csvs`.

Training draws a cluster, then one of its members. Both are written in the order of the mapping, not of the FASTA
files: cluster c is row c of `uf50/train`, and its members are the rows starts[c] to starts[c] + counts[c] of the
UniRef90 shards. `starts.mmap` and `counts.mmap` (uint64, as in BioNeMo v1) are in `uf50/train`.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import ClustersJob
from bionemo.preparation.checksums import OutputFile, checksum_file, write_with_checksum
from bionemo.preparation.chunks import Chunk, count_records, split_into_chunks
from bionemo.preparation.manifest import Manifest
from bionemo.preparation.mapping import ClusterMapping, EntryType
from bionemo.preparation.pool import worker_pool
from bionemo.preparation.sequences import decompress, shard_sizes
from bionemo.preparation.shards import RowAssignment, write_consecutive_rows, write_shards
from bionemo.preparation.staged_output import StagedOutput, stage_output

_FILES = ("uf50_datapath", "val_datapath", "test_datapath", "uf90_datapath", "cluster_mapping_tsv")
_V1_MAPPING = "uniref50_mapper_to_uniref90clustermembers_andselfuniref50.tsv"
_PARAMETERS = ("num_csv_files", "on_empty", "on_duplicate", "on_letters", "on_unknown", "on_shared")
_COPY_BYTES = 4 << 20


def prepare(job: ClustersJob) -> None:
    """Write the clusters, their members and the held-out splits; raw files in other directories are copied.

    Raises:
        UserError: if a file is missing or cannot be read, or data is invalid and its policy is `error`.
    """
    parameters = {key: getattr(job, key) for key in _PARAMETERS}
    custom = {split: Path(path) for split, path in job.custom_pretraining_fasta_path.items() if path}
    if custom:
        name, parameters["splits"], directories = "own sequences", sorted(custom), sorted(custom)
        paths = list(custom.values())
    else:
        name, directories = "clusters", ["uf50", "uf90"]
        paths = list(dict.fromkeys(_input_path(job, key) for key in _FILES))
    sources = [os.path.abspath(path) for path in paths]
    with stage_output(job.output, name, parameters, directories, sources=sources, force=job.force) as output:
        if output is None:
            return
        for key in _FILES if not custom else ():
            _check_exists(key, _input_path(job, key))
        for split, path in custom.items():
            _check_exists(f"{split}.custom_pretraining_fasta_path", path)
        with worker_pool(job) as workers:
            writer = _Writer(job, output, workers)
            if custom:
                for split, path in custom.items():
                    writer.write_in_input_order(path, split)
                    output.add_input(path, str(path), workers.submit(checksum_file, path).result())
            else:
                writer.write_all(paths)
        readme = Path(job.output) / "README.md"
        if not custom and (not readme.exists() or readme.read_bytes().startswith(_TITLE.encode())):
            output.write("README.md", _format_readme(output.manifest).encode())


def _input_path(job: ClustersJob, key: str) -> Path:
    """Return the path of an input; the mapping may have its name in BioNeMo v1."""
    path = Path(getattr(job, key))
    if key == "cluster_mapping_tsv" and not path.is_file() and path.with_name(_V1_MAPPING).is_file():
        return path.with_name(_V1_MAPPING)
    return path


def _check_exists(key: str, path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}: download it, or set {key} to its path")


def _is_in(path: Path, directory: Path) -> bool:
    return path.parent.resolve() == directory.resolve()


def _copy(path: Path, target: Path) -> OutputFile:
    with path.open("rb", buffering=0) as source:
        return write_with_checksum(target, iter(partial(source.read, _COPY_BYTES), b""))


@dataclass(frozen=True)
class _Writer:
    """Writes the splits of a job."""

    job: ClustersJob
    output: StagedOutput
    workers: Executor

    def write_all(self, paths: Sequence[Path]) -> None:
        """Write clusters, members and held-out splits, and copy the raw files, `paths`."""
        job, output, directory = self.job, self.output, Path(self.job.output)
        self._check_copies(paths)
        copies = {path: self._copy_raw(path) for path in paths}
        table = _input_path(job, "cluster_mapping_tsv")
        scratch = output.scratch / "mapping"
        mapping = ClusterMapping.read(decompress(table, output), str(table), scratch, self.workers, job.on_shared)
        self._write_clusters(mapping, Path(job.uf50_datapath), Path(job.uf90_datapath))
        for split in ("val", "test"):
            self.write_in_input_order(Path(getattr(job, f"{split}_datapath")), f"uf50/{split}")
        for path, future in copies.items():
            content = future.result()
            output.add_input(path, str(path), content)
            if not _is_in(path, directory):
                output.manifest.files[path.name] = content

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

    def _check_copies(self, paths: Sequence[Path]) -> None:
        """Check that the copies of raw files replace neither each other nor existing files."""
        directory = Path(self.job.output)
        path_of_name: dict[str, Path] = {}
        for path in paths:
            other, copy = path_of_name.setdefault(path.name, path), directory / path.name
            if other.resolve() != path.resolve():
                raise UserError(
                    f"{other} and {path} have the same name and cannot both be kept in {directory}: rename one"
                )
            if copy.exists() and not _is_in(path, directory) and not self.job.force:
                raise UserError(f"{copy} exists, so {path} cannot be copied: move it away, or set force=True")

    def _copy_raw(self, path: Path) -> Future[OutputFile]:
        """Compute the checksum of a raw file, and copy the file unless it is in the output directory."""
        directory = Path(self.job.output)
        if _is_in(path, directory):
            return self.workers.submit(checksum_file, path)
        return self.workers.submit(_copy, path, self.output.path(path.name))

    def _write_clusters(self, mapping: ClusterMapping, uf50: Path, uf90: Path) -> None:
        """Write clusters and members in the order of the mapping, and the first row and number of their members."""
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
            return RowAssignment(rows, mapping.index_directory(entry_type)), sizes

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


def _format_readme(manifest: Manifest) -> str:
    counts = "\n".join(
        f"* {name}: {counts.read:,} sequences read, {counts.written:,} written to {', '.join(counts.into)}"
        for name, counts in manifest.tallies.items()
    )
    return _TITLE + _README.format(counts=counts)


_TITLE = "# UniRef50 clusters with their UniRef90 members\n\n"
_README = """\
{counts}

`uf50/train` contains one sequence of each cluster and `uf90/uf90_csvs` contains all members, both in the order of the
mapping. `uf50/train/starts.mmap` and `counts.mmap` (uint64) contain the first UniRef90 row and the number of members
of each cluster. Training draws a cluster uniformly, then one of its members:

    python pretrain.py --config-name=pretrain_esm2_8M model.data.dataset_path=<this directory>

`manifest.json` contains the checksums of all files and the record counts. To check them:

    bionemo preprocess --verify <this directory>
"""
