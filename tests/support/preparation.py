# SPDX-License-Identifier: Apache-2.0
"""Input files and jobs for data preparation, and a reference implementation of its result."""

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from bionemo.config.schema.preparation import SequencesJob
from bionemo.preparation import chunks, name_index, records, sequences
from bionemo.preparation import shards as shards_module
from bionemo.preparation.manifest import Manifest, verify

T = TypeVar("T")
SPLITS = ("train", "val", "test")


class Inline(Executor):
    """Runs tasks in this process, where patched constants apply."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = Future[T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def inline(*_: object) -> Iterator[Executor]:
    """Replace `bionemo.preparation.pool.worker_pool`."""
    yield Inline()


@contextmanager
def small(**sizes: int) -> Iterator[None]:
    """Make chunks, blocks, buckets and partitions a few bytes small."""
    places = {
        "chunk": [(chunks, "_CHUNK_BYTES")],
        "block": [(records, "BLOCK_BYTES"), (chunks, "BLOCK_BYTES")],
        "bucket": [(shards_module, "_BUCKET_BYTES")],
        "partition": [(name_index, "_PARTITION_SIZE")],
    }
    with ExitStack() as stack:
        for name, size in sizes.items():
            for module, constant in places[name]:
                stack.enter_context(patch.object(module, constant, size))
        yield


def make_job(source: Path | str | Sequence[Path | str], output: Path, **changes: Any) -> SequencesJob:
    values: dict[str, Any] = {
        **{"_target_": "", "output": str(output), "force": False, "num_preprocess_workers": 1, "engine": "local"},
        **{"val_size": 1, "test_size": 1, "seed": 0, "num_csv_files": 2},
        **{"on_empty": "error", "on_duplicate": "error", "on_letters": "error"},
        **{"source": str(source) if isinstance(source, Path | str) else [str(path) for path in source]},
        **{
            "checksum": None,
            "format": "auto",
            "id_column": "id",
            "sequence_column": "sequence",
            "separator": ",",
            "output_format": "csv",
            "duplicates": "keep",
            "split": "random",
            "min_seq_id": 0.3,
            "coverage": 0.8,
            "cluster_tsv": None,
        },
    }
    return SequencesJob(**(values | changes))


def prepare(source: Path | str | Sequence[Path | str], output: Path, workers: int = 0, **changes: Any) -> Manifest:
    """Prepare, in this process unless `workers` is set, and verify the result."""
    with nullcontext() if workers else patch.object(sequences, "worker_pool", inline):
        sequences.prepare(make_job(source, output, num_preprocess_workers=workers, **changes))
    assert verify(output) == []
    assert not [path for path in output.iterdir() if path.name.startswith(".preparing-")]
    manifest = Manifest.read(output)
    assert manifest is not None
    return manifest


def shards(output: Path) -> dict[str, bytes]:
    paths = {path.relative_to(output).as_posix(): path for path in output.rglob("*.csv")}
    return {name: path.read_bytes() for name, path in paths.items() if not name.startswith(".")}


def left(output: Path) -> list[Path]:
    """Return all entries of an output directory, including hidden ones."""
    return [*output.iterdir()] if output.exists() else []


def rows(output: Path) -> dict[str, list[list[str]]]:
    """Return all rows of each split in the order of the shards, without headers."""
    return {
        split: [
            row
            for path in sorted((output / split).glob("*.csv"))
            for row in list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))[1:]
        ]
        for split in SPLITS
    }


def parse(content: bytes) -> list[tuple[str, str]]:
    """Parse FASTA line by line."""
    records: list[tuple[str, str]] = []
    for line in content.removeprefix(b"\xef\xbb\xbf").decode().replace("\r\n", "\n").split("\n"):
        if line.startswith(">"):
            records.append((re.split("[ \t]", line[1:])[0], ""))
        elif line:
            records[-1] = records[-1][0], records[-1][1] + line
    return records


def reference(
    records: Sequence[tuple[str, str]],
    val: int,
    test: int,
    seed: int,
    files: int,
    numbers: Sequence[int] | None = None,
) -> dict[str, bytes]:
    """Return the shards of BioNeMo v1, which divides a shuffled list into validation, test and training."""
    order = np.arange(len(records))
    np.random.default_rng(seed).shuffle(order)
    result = {}
    for split, part in (("val", order[:val]), ("test", order[val : val + test]), ("train", order[val + test :])):
        for i, piece in enumerate(np.array_split(part, min(files, len(part))) if len(part) else []):
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["record_id", "record_name", "sequence_length", "sequence"])
            for index in piece.tolist():
                name, letters = records[index]
                number = numbers[index] if numbers else index + 1
                writer.writerow([number, name, len(letters), letters.upper()])
            result[f"{split}/x{i:03}.csv"] = text.getvalue().encode()
    return result


def write(folder: Path, content: str | bytes, name: str = "x.fasta") -> Path:
    path = folder / name
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    return path


def generated(count: int, seed: int = 0, longest: int = 90) -> str:
    rng = np.random.default_rng(seed)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return "".join(
        f">n{i} of {count}\n{''.join(rng.choice(letters, rng.integers(1, longest)))}\n" for i in range(count)
    )
