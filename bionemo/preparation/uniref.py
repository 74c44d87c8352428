# SPDX-License-Identifier: Apache-2.0
"""UniRef50 clusters with their UniRef90 members, for ESM-2: `uf50/{train,val,test}` and `uf90/uf90_csvs`.

Training draws a cluster, then a member of it. So both are written in the order of the mapping, whatever the order of
the FASTA files: cluster c is row c of `uf50/train`, its members are rows starts[c] to starts[c] + counts[c] of the
UniRef90 shards. `starts.mmap` and `counts.mmap` (uint64, as BioNeMo v1 has them) lie in `uf50/train`.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import ClustersJob
from bionemo.preparation.checksums import OutputFile, measure
from bionemo.preparation.chunks import count
from bionemo.preparation.manifest import Manifest
from bionemo.preparation.mapping import Mapping, ranks
from bionemo.preparation.names import is_top_level
from bionemo.preparation.pool import pool
from bionemo.preparation.sequences import plain, shard_sizes, stretches_of
from bionemo.preparation.shards import ByName, ByNumber, deal, in_order
from bionemo.preparation.shuffle import write_all
from bionemo.preparation.writer import Draft, draft

_FILES = ("uf50_datapath", "val_datapath", "test_datapath", "uf90_datapath", "cluster_mapping_tsv")
_V1_MAPPING = "uniref50_mapper_to_uniref90clustermembers_andselfuniref50.tsv"
_PLACES = ("uf50", "uf90")
_PARAMETERS = ("num_csv_files", "on_empty", "on_duplicate", "on_letters", "on_unknown", "on_shared")
_BLOCK = 4 << 20


def prepare(job: ClustersJob) -> None:
    """Write the whole tree; raw files that lie elsewhere are copied into it.

    Raises:
        UserError: for a file that is missing or cannot be read, and for whatever a policy calls an error.
    """
    output = Path(job.output)
    own = {split: path for split, path in job.custom_pretraining_fasta_path.items() if path}
    if own:
        _own_sequences(job, output, own)
        return
    parameters = {key: getattr(job, key) for key in _PARAMETERS}
    sources = [
        os.path.abspath(path) for path in dict.fromkeys(_path(name, Path(getattr(job, name))) for name in _FILES)
    ]
    with draft(output, "clusters", parameters, _PLACES, sources=sources, force=job.force) as made:
        if made is None:
            return
        paths = {name: _existing(name, Path(getattr(job, name))) for name in _FILES}
        _check_room(paths.values(), output, job.force)
        with pool(job.num_preprocess_workers) as workers:
            copied = {path: _keep(path, output, made, workers) for path in dict.fromkeys(paths.values())}
            table_path = paths["cluster_mapping_tsv"]
            table = Mapping.read(
                plain(table_path, made), str(table_path), made.scratch / "mapping", workers, job.on_shared
            )
            _sets(job, made, workers, table, paths["uf50_datapath"], paths["uf90_datapath"])
            for split in ("val", "test"):
                _in_order(job, made, workers, paths[f"{split}_datapath"], f"uf50/{split}")
            for path, future in copied.items():
                found = future.result()
                made.add_input(os.path.abspath(path), path, found)
                if not _lies_in(path, output):
                    made.manifest.files[path.name] = found
        readme = output / "README.md"
        if not readme.exists() or readme.read_bytes().startswith(_TITLE.encode()):
            made.write("README.md", _readme(made.manifest).encode())


def _own_sequences(job: ClustersJob, output: Path, own: dict[str, str]) -> None:
    """Write the user's own sequences, each split from its file."""
    parameters = {key: getattr(job, key) for key in _PARAMETERS} | {"splits": sorted(own)}
    sources = [os.path.abspath(path) for path in own.values()]
    with draft(output, "own sequences", parameters, sorted(own), sources=sources, force=job.force) as made:
        if made is None:
            return
        paths = {split: _existing(f"{split}.custom_pretraining_fasta_path", Path(path)) for split, path in own.items()}
        with pool(job.num_preprocess_workers) as workers:
            for split, path in paths.items():
                _in_order(job, made, workers, path, split)
                made.add_input(os.path.abspath(path), path, workers.submit(measure, path).result())


def _path(name: str, path: Path) -> Path:
    """Find a file where it shall be; v1 called the mapping otherwise."""
    if not path.is_file() and name == "cluster_mapping_tsv" and path.with_name(_V1_MAPPING).is_file():
        return path.with_name(_V1_MAPPING)
    return path


def _existing(name: str, path: Path) -> Path:
    path = _path(name, path)
    if not path.is_file():
        raise UserError(f"{name}: there is no file {path}: download it there, or say where it is")
    return path


def _check_room(paths: Iterable[Path], output: Path, force: bool) -> None:
    """See that the copies of raw files replace neither each other nor other files."""
    places: dict[str, Path] = {}
    for path in paths:
        other = places.setdefault(path.name, path)
        if not is_top_level(path.name):
            raise UserError(f"{path} cannot be copied to {output} under this name: rename it")
        if other.resolve() != path.resolve():
            raise UserError(f"{other} and {path} have the same name and cannot both be kept in {output}: rename one")
        if (output / path.name).exists() and not _lies_in(path, output) and not force:
            raise UserError(f"{output / path.name} is in the way of a copy of {path}: move it away, or set force=True")


def _lies_in(path: Path, output: Path) -> bool:
    return path.parent.resolve() == output.resolve()


def _keep(path: Path, output: Path, made: Draft, workers: Executor) -> "Future[OutputFile]":
    """Take the checksum of a raw file, and copy it on the way unless it lies in the output."""
    if _lies_in(path, output):
        return workers.submit(measure, path)
    return workers.submit(_copy, path, made.path(path.name), output / path.name)


def _copy(path: Path, target: Path, former: Path) -> OutputFile:
    """Copy a file unless the former copy is the same."""
    if former.is_file() and not former.is_symlink() and former.stat().st_size == path.stat().st_size:
        found = measure(path)
        if measure(former) == found:
            return found
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as file:
        while block := source.read(_BLOCK):
            write_all(file.fileno(), memoryview(block))
            digest.update(block)
            size += len(block)
        os.fsync(file.fileno())
    return OutputFile(size, digest.hexdigest())


def _sets(job: ClustersJob, made: Draft, workers: Executor, table: Mapping, uf50: Path, uf90: Path) -> None:
    """Write clusters and members in the order of the table, and the map from ones to others."""
    if job.on_unknown == "error" and not table.counts.all():
        line = table.tell("cluster", int(np.flatnonzero(table.counts == 0)[0]))
        raise UserError(f"{line} has no members: correct the table, or set on_unknown=skip")
    into = "uf50/train"
    _by_name(job, made, workers, table, "cluster", uf50, into)
    table.settle()
    _by_name(job, made, workers, table, "member", uf90, "uf90/uf90_csvs")
    counts = table.settle()[table.has_cluster]
    if not len(counts):
        raise UserError(
            f"no cluster of {table.shown} has a sequence in {uf50} and a member in {uf90}: check the files"
        )
    if made.manifest.tallies[uf50.name].written != len(counts):  # some clusters have lost all their members
        shutil.rmtree(made.directory / into)
        made.manifest.files = {
            name: file for name, file in made.manifest.files.items() if Path(name).parent != Path(into)
        }
        _by_name(job, made, workers, table, "cluster", uf50, into)
    for name, content in (("counts", counts), ("starts", np.cumsum(counts) - counts)):
        made.write(f"{into}/{name}.mmap", content.astype(np.uint64).tobytes())


def _by_name(
    job: ClustersJob,
    made: Draft,
    workers: Executor,
    table: Mapping,
    kind: Literal["cluster", "member"],
    path: Path,
    into: str,
) -> None:
    """Write the sequences of one FASTA in the order of the table; what it does not hold goes from the table."""
    kept = table.has_cluster if kind == "cluster" else table.has_member

    def arrange(left_out: NDArray[np.int64]) -> tuple[ByName, Sequence[tuple[str, int]]]:
        place = ranks(made.scratch / f"{kind}.rows", kept)
        return ByName(table.scratch / kind, place), shard_sizes(into, int(kept.sum()), job.num_csv_files)

    def missing(rows: NDArray[np.int64]) -> None:
        absent = np.flatnonzero(kept)[rows]
        if job.on_unknown == "error":
            raise UserError(
                f"{table.tell(kind, int(absent[0]))}, which {path} does not hold ({len(absent):,} such {kind}s): "
                "take the file that belongs to the table, or set on_unknown=skip"
            )
        kept[absent] = False

    stretches = count(workers, stretches_of(path, str(path), made, None))
    deal(made, workers, path.name, stretches, job, arrange, [into], missing)
    made.manifest.tallies[path.name].changed[f"{kind}s of the table left out"] = int((~kept).sum())


def _in_order(job: ClustersJob, made: Draft, workers: Executor, path: Path, into: str) -> None:
    """Write a held-out set as it comes."""
    stretches = count(workers, stretches_of(path, str(path), made, None))
    total = sum(stretch.records for stretch in stretches)

    def arrange(left_out: NDArray[np.int64]) -> tuple[ByNumber, Sequence[tuple[str, int]]]:
        place = in_order(made.scratch / "in_order.rows", total, left_out)
        return place, shard_sizes(into, total - len(left_out), job.num_csv_files)

    deal(made, workers, f"{path.name} for {into}", stretches, job, arrange, [into])


def _readme(manifest: Manifest) -> str:
    books = "\n".join(
        f"* {name}: {tally.read:,} sequences read, {tally.written:,} written to {', '.join(tally.into)}"
        for name, tally in manifest.tallies.items()
    )
    return _TITLE + _README.format(books=books)


_TITLE = "# UniRef50 clusters with their UniRef90 members\n\n"
_README = """\
{books}

`uf50/train` holds one sequence of each cluster, `uf90/uf90_csvs` all members, both in the order of the mapping;
`uf50/train/starts.mmap` and `counts.mmap` (uint64) say which UniRef90 rows are the members of a cluster. Training
draws a cluster uniformly, then one of its members:

    python pretrain.py --config-name=pretrain_esm2_8M model.data.dataset_path=<this directory>

`manifest.json` holds the checksums of all files and what became of every record; to check them:

    python -m bionemo.preprocess --verify <this directory>
"""
