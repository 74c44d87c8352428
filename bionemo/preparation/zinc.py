# SPDX-License-Identifier: Apache-2.0
"""ZINC15 tranches, or any SMILES files, to shards of distinct canonical SMILES in random order.

A molecule's place in the order is a hash of its canonical SMILES under the seed. So molecules that are the same meet
wherever they come from, and shuffling and finding duplicates are one: rows are thrown into buckets by the first digits
of their hash as they come from RDKit, then each bucket is sorted in memory. The order depends neither on the number of
processes nor, but for the duplicates' ids, on the order of the files.
"""

import csv
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from bionemo.common.errors import UserError
from bionemo.common.random_stream import purpose_key
from bionemo.config.schema.preparation import ZincJob
from bionemo.preparation.addresses import is_url, public
from bionemo.preparation.checksums import OutputFile, measure
from bionemo.preparation.inputs import is_gzipped
from bionemo.preparation.molecules import Lines, canonical_smiles, smiles_lines
from bionemo.preparation.pool import in_order
from bionemo.preparation.progress import progress
from bionemo.preparation.tranches import known, tranches
from bionemo.preparation.writer import Draft, draft

SPLITS = ("train", "val", "test")
_NOT_PARAMETERS = ("_target_", "output", "force", "num_preprocess_workers", "source")
_HEADER = b"zinc_id,smiles\n"
_BUCKET = 32 << 20  # bytes of input that a bucket is meant for
_HELD = 64 << 20  # bytes of rows kept back, so that buckets are written to in long runs
_DIGITS = 32  # of a hash of 128 bits: among 1.5 billion molecules two share one by chance once in 10^20 times
_UNZIPPED = 5  # times the size of a gzipped file


class _Parsed(NamedTuple):
    """What became of some lines: rows `hash,id,SMILES`, and the books."""

    rows: list[bytes]
    read: int
    dropped: Counter[str]
    size: int


def prepare(job: ZincJob) -> None:
    """Write `{train,val,test}/x000.csv ...`, with the header `zinc_id,smiles`.

    SMILES are written as RDKit does, those longer than `max_smiles_length` and repeated ones are dropped, the others
    shuffled and cut into shards as `shard_sizes` says. On the way it takes 1.6 times the result's room on the disk.

    Raises:
        UserError: for an input that cannot be had or read, a molecule that a policy calls an error, and sizes that
            leave a split empty.
    """
    if job.train_size < 1 or min(job.val_size, job.test_size) < 0:
        raise UserError(
            f"train_size={job.train_size}, val_size={job.val_size}, test_size={job.test_size}: they are molecules "
            "of a shard, and a training shard needs at least 1"
        )
    parameters = {key: value for key, value in asdict(job).items() if key not in _NOT_PARAMETERS}
    if is_url(job.source):
        parameters["source"] = public(job.source)
    raw = Path(job.output) / "raw"
    with draft(job.output, "zinc", parameters, SPLITS, sources=known(job.source, raw), force=job.force) as made:
        if made is None:
            return
        files = tranches(job.source, raw)
        tally = made.tally(public(job.source), *SPLITS)
        dropped: Counter[str] = Counter()
        sizes = [path.stat().st_size for path, _ in files]
        with (
            progress("reading molecules", sum(sizes)) as advance,
            closing(
                in_order(partial(_parse, job), smiles_lines(_noted(files, made)), job.num_preprocess_workers)
            ) as parsed,
        ):
            buckets = _Buckets(made.scratch, files)
            for part in parsed:
                buckets.add(part.rows)
                tally.read += part.read
                dropped += part.dropped
                advance(part.size)
            buckets.flush()

        paths = buckets.paths
        with (
            progress("sorting molecules", sum(path.stat().st_size for path in paths)) as advance,
            closing(in_order(partial(_sort, job.on_duplicate), paths, job.num_preprocess_workers)) as counts,
        ):
            for kept, repeated, size in counts:
                tally.written += kept
                dropped["duplicate"] += repeated
                advance(size)
        tally.dropped = {reason: count for reason, count in sorted(dropped.items()) if count}
        _deal(made, paths, shard_sizes(tally.written, job.train_size, job.val_size, job.test_size))


def shard_sizes(molecules: int, train: int, val: int, test: int) -> list[dict[str, int]]:
    """Say how many molecules each shard of each split holds.

    The shuffled molecules are cut into groups of `train + val + test`; group k makes shard k of the three splits. The
    last group, which is not full, is divided in the same proportions, val and test rounded down but at least 1. If it
    is too small for a molecule in each, it goes to the last shard of training.

    Raises:
        UserError: when all molecules together are too few for one in each split.
    """
    group = train + val + test
    full, rest = divmod(molecules, group)
    shards = [{"train": train, "val": val, "test": test} for _ in range(full)]
    if rest >= 1 + (val > 0) + (test > 0):
        held = {"val": max(1, rest * val // group) if val else 0, "test": max(1, rest * test // group) if test else 0}
        if sum(held.values()) == rest:  # one of them is next to everything: training gets one of it
            held[max(held, key=held.__getitem__)] -= 1
        shards.append({"train": rest - sum(held.values()), **held})
    elif shards:
        shards[-1]["train"] += rest
    else:
        raise UserError(
            f"{molecules} molecules are left, too few to divide: give more of them, raise max_smiles_length, or set "
            "val_size=0 and test_size=0"
        )
    return shards


def _noted(files: Iterable[tuple[Path, str]], made: Draft) -> Iterator[tuple[Path, str]]:
    """Enter each file into the manifest when its turn comes; it is then read from the page cache."""
    for path, shown in files:
        found = measure(path)
        made.add_input(shown if "://" in shown else os.path.abspath(path), path, found)
        yield path, shown


def _parse(job: ZincJob, lines: Lines) -> _Parsed:
    seed = purpose_key(job.seed, "molecules")
    rows: list[bytes] = []
    dropped: Counter[str] = Counter()
    read = 0
    for line, text, name in lines.rows():
        read += 1
        smiles = canonical_smiles(text)
        if smiles is None:
            if job.on_invalid == "error":
                raise UserError(
                    f"{lines.shown}:{line}: RDKit cannot read the SMILES {text!r}: correct it, or set on_invalid=skip"
                )
            dropped["invalid SMILES"] += 1
        elif len(smiles) > job.max_smiles_length:
            dropped[f"longer than {job.max_smiles_length}"] += 1
        else:
            own = f" {lines.file}:{line}" if job.on_duplicate == "keep" else ""  # then no two are the same
            digest = xxhash.xxh3_128_hexdigest((smiles + own).encode(), seed=seed)
            rows.append(f"{digest},{_quoted(name)},{smiles}\n".encode())
    return _Parsed(rows, read, dropped, lines.size)


def _quoted(name: str) -> str:
    if not set(name) & {",", '"', "\r"}:
        return name
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([name])
    return text.getvalue()


class _Buckets:
    """Rows by the first digits of their hash, in the order they came."""

    def __init__(self, directory: Path, files: Sequence[tuple[Path, str]]) -> None:
        size = sum(path.stat().st_size * (_UNZIPPED if is_gzipped(path) else 1) for path, _ in files)
        self.paths = [directory / f"{number:06}.rows" for number in range(size // _BUCKET + 1)]
        self._rows: list[list[bytes]] = [[] for _ in self.paths]
        self._held = 0
        for path in self.paths:
            path.touch()

    def add(self, rows: Sequence[bytes]) -> None:
        number = len(self.paths)
        for row in rows:
            self._rows[int(row[:8], 16) * number >> 32].append(row)
            self._held += len(row)
        if self._held > _HELD:
            self.flush()

    def flush(self) -> None:
        for path, rows in zip(self.paths, self._rows, strict=True):
            if rows:
                with path.open("ab") as file:
                    file.write(b"".join(rows))
                rows.clear()
        self._held = 0


def _sort(on_duplicate: str, path: Path) -> tuple[int, int, int]:
    """Sort a bucket in place, drop duplicates and hashes; give the rows kept, those dropped, and the bytes there were.

    Raises:
        UserError: a duplicate, where that is an error.
    """
    data = path.read_bytes()
    rows = data.split(b"\n")[:-1]
    rows.sort(key=lambda row: row[:_DIGITS])  # stable: of the same molecules the first stays the first
    kept: list[bytes] = []
    before = b""
    for row in rows:
        if row[:_DIGITS] != before[:_DIGITS]:
            kept.append(row[_DIGITS + 1 :] + b"\n")
            before = row
        elif on_duplicate == "error":
            (first, smiles), (second, _) = (each[_DIGITS + 1 :].decode().rsplit(",", 1) for each in (before, row))
            raise UserError(
                f"{first} and {second} are the same molecule, {smiles}: remove one, or set on_duplicate=skip or keep"
            )
    path.write_bytes(b"".join(kept))
    return len(kept), len(rows) - len(kept), len(data)


def _deal(made: Draft, buckets: Sequence[Path], shards: Sequence[dict[str, int]]) -> None:
    """Cut the sorted buckets, end to end, into shards."""
    rows = _Rows(buckets)
    with progress("writing molecules", sum(path.stat().st_size for path in buckets)) as advance:
        for number, sizes in enumerate(shards):
            for split, count in sizes.items():
                if not count:
                    continue
                name = f"{split}/x{number:03}.csv"
                digest, size = hashlib.sha256(), 0
                with made.path(name).open("wb") as file:
                    for part in chain([memoryview(_HEADER)], rows.take(count)):
                        file.write(part)
                        digest.update(part)
                        size += len(part)
                        advance(len(part))
                    file.flush()
                    os.fsync(file.fileno())
                made.manifest.files[name] = OutputFile(size, digest.hexdigest(), count)


class _Rows:
    """The rows of sorted buckets, from the first to the last; a bucket is removed once it is in memory."""

    def __init__(self, buckets: Iterable[Path]) -> None:
        self._buckets = iter(buckets)
        self._data = memoryview(b"")
        self._ends = np.zeros(1, np.int64)  # of the rows, after a 0
        self._taken = 0

    def take(self, count: int) -> Iterator[memoryview]:
        while count:
            if self._taken == len(self._ends) - 1:
                path = next(self._buckets)
                data = path.read_bytes()
                path.unlink()
                self._data, self._taken = memoryview(data), 0
                self._ends = np.append(0, np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1)
                continue
            stop = min(self._taken + count, len(self._ends) - 1)
            yield self._data[self._ends[self._taken] : self._ends[stop]]
            count -= stop - self._taken
            self._taken = stop
