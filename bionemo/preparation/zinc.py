# SPDX-License-Identifier: Apache-2.0
"""Prepare ZINC15 tranches, or other SMILES files, as shards of distinct canonical SMILES in random order.

Duplicates have the same canonical SMILES: rows are distributed to buckets by its hash, and each bucket is searched in
memory. The others are sorted by a seeded hash of their SMILES in the file, which shuffles them, again in buckets. The
order depends neither on the number of processes nor, except for the ids of duplicates, on the order of the files. It
does not depend on the version of RDKit, whose canonical SMILES change between releases.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import xxhash

from bionemo.common.errors import UserError
from bionemo.common.progress import progress
from bionemo.common.random_stream import purpose_key
from bionemo.config.schema.preparation import ZincJob
from bionemo.data.files import SPLITS
from bionemo.preparation.checksums import checksum_file, write_with_checksum
from bionemo.preparation.inputs import is_gzipped
from bionemo.preparation.molecules import SmilesBlock, canonical_smiles, read_smiles
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.tranches import fetch_tranches, known_tranches
from bionemo.preparation.urls import is_url, redact_url

_HEADER = b"zinc_id,smiles\n"
_BUCKET_BYTES = 32 << 20  # bytes of input per bucket
_BUFFER_BYTES = 64 << 20  # rows are buffered, so that buckets are written in long runs
_HASH_DIGITS = 32  # 128 bits: a collision among 1.5 billion molecules has a probability of 10^-20
_KEY_DIGITS = 16  # 64 bits: rows with the same key are sorted by their content
_GZIP_RATIO = 5  # estimate


class _ParsedBlock(NamedTuple):
    """Rows of a block of lines, and its record counts.

    A row is `hash of the canonical SMILES,key of the order,id,canonical SMILES`; without the hash if duplicates are
    kept.
    """

    rows: list[bytes]
    read: int
    dropped: Counter[str]
    size: int


def prepare(job: ZincJob) -> None:
    """Write `{train,val,test}/x000.csv ...` with the header `zinc_id,smiles`.

    Molecules longer than `max_smiles_length` and duplicates are dropped. The others are shuffled and divided into
    shards, see `shard_sizes`. The required disk space is twice the size of the result.

    Raises:
        UserError: if an input cannot be read or downloaded, a molecule is invalid and its policy is `error`, or the
            sizes leave a split empty.
    """
    parameters = result_parameters(job)
    if is_url(job.source):
        parameters["source"] = redact_url(job.source)
    raw = Path(job.output) / "raw"
    sources = known_tranches(job.source, raw)
    with stage_output(job.output, "zinc", parameters, SPLITS, sources=sources, force=job.force) as output:
        if output is None:
            return
        files = fetch_tranches(job.source, raw)
        counts = output.add_counts(redact_url(job.source), *SPLITS)
        dropped: Counter[str] = Counter()
        blocks = read_smiles(_add_inputs(files, output), job.sequence_column, job.id_column)
        buckets = _Buckets(output.scratch, "molecules", files)
        output.require_space(buckets.size)
        limit = len(buckets.paths)  # of processes: starting one takes longer than a bucket
        with (
            progress("reading molecules", sum(path.stat().st_size for path, _ in files)) as advance,
            closing(map_ordered(partial(_parse_block, job), blocks, job)) as results,
        ):
            for result in results:
                buckets.add(result.rows)
                counts.read += result.read
                dropped += result.dropped
                advance(result.size)
            buckets.flush()
        if job.on_duplicate != "keep":
            with_duplicates, buckets = buckets.paths, _Buckets(output.scratch, "distinct", files)
            with (
                progress("removing duplicates", sum(path.stat().st_size for path in with_duplicates)) as advance,
                closing(
                    map_ordered(partial(_remove_duplicates, job.on_duplicate), with_duplicates, job, limit)
                ) as distinct,
            ):
                for rows, duplicates, size in distinct:
                    buckets.add(rows)
                    dropped["duplicate"] += duplicates
                    advance(size)
            buckets.flush()
        with (
            progress("sorting molecules", sum(path.stat().st_size for path in buckets.paths)) as advance,
            closing(map_ordered(_sort_bucket, buckets.paths, job, limit)) as sizes,
        ):
            for size in sizes:
                advance(size)

        counts.written = counts.read - dropped.total()
        counts.dropped = {reason: count for reason, count in sorted(dropped.items()) if count}
        lost = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.items())
        sizes_of_shards = shard_sizes(counts.written, job.train_size, job.val_size, job.test_size, lost)
        _write_shards(output, buckets.paths, sizes_of_shards)


def shard_sizes(molecules: int, train: int, val: int, test: int, lost: str = "") -> list[dict[str, int]]:
    """Return the number of molecules in each shard of each split.

    The shuffled molecules are divided into groups of `train + val + test`; group k forms shard k of the three splits.
    The last group, if incomplete, is divided in the same proportions, val and test rounded down but at least 1. If it
    is too small for one molecule in each split, it is added to the last training shard. `lost` describes the molecules
    that were left out, for the message.

    Raises:
        UserError: if there are too few molecules for one in each split.
    """
    group = train + val + test
    full, rest = divmod(molecules, group)
    shards = [{"train": train, "val": val, "test": test} for _ in range(full)]
    if rest >= 1 + (val > 0) + (test > 0):
        held_out = {
            "val": max(1, rest * val // group) if val else 0,
            "test": max(1, rest * test // group) if test else 0,
        }
        if sum(held_out.values()) == rest:  # leave one molecule for training
            held_out[max(held_out, key=held_out.__getitem__)] -= 1
        shards.append({"train": rest - sum(held_out.values()), **held_out})
    elif shards:
        shards[-1]["train"] += rest
    else:
        raise UserError(
            f"{molecules} molecules are left, too few to divide{f' ({lost})' if lost else ''}: add molecules, raise "
            "max_smiles_length, or set val_size=0 and test_size=0"
        )
    return shards


def _add_inputs(files: Iterable[tuple[Path, str]], output: StagedOutput) -> Iterator[tuple[Path, str]]:
    """Add each file to the manifest just before it is read, so that reading it uses the page cache."""
    for path, display_path in files:
        output.add_input(path, display_path, checksum_file(path))
        yield path, display_path


def _parse_block(job: ZincJob, block: SmilesBlock) -> _ParsedBlock:
    seed = purpose_key(job.seed, "molecules")
    rows: list[bytes] = []
    dropped: Counter[str] = Counter()
    read = 0
    for line, text, name in block.rows():
        read += 1
        smiles = canonical_smiles(text)
        if smiles is None:
            if job.on_invalid == "error":
                raise UserError(
                    f"{block.lines.display_path}:{line}: RDKit cannot read the SMILES {text!r}: correct it, or set "
                    "on_invalid=skip"
                )
            dropped["invalid SMILES"] += 1
        elif len(smiles) > job.max_smiles_length:
            dropped[f"longer than {job.max_smiles_length}"] += 1
        else:
            if job.on_duplicate == "keep":
                prefix, ordered_by = "", f"{text} {block.file}:{line}"  # makes every key unique
            else:
                prefix, ordered_by = xxhash.xxh3_128_hexdigest(smiles.encode()) + ",", text
            key = xxhash.xxh3_64_hexdigest(ordered_by.encode(), seed=seed)
            rows.append(f"{prefix}{key},{_quote(name)},{smiles}\n".encode())
    return _ParsedBlock(rows, read, dropped, block.lines.size)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set(name) & {",", '"', "\r"} else name


class _Buckets:
    """Files of rows by their first digits, in the order of arrival."""

    def __init__(self, directory: Path, name: str, files: Sequence[tuple[Path, str]]) -> None:
        self.size = sum(path.stat().st_size * (_GZIP_RATIO if is_gzipped(path) else 1) for path, _ in files)
        self.paths = [directory / f"{name}-{index:06}.rows" for index in range(self.size // _BUCKET_BYTES + 1)]
        self._rows: list[list[bytes]] = [[] for _ in self.paths]
        self._buffered_bytes = 0
        for path in self.paths:
            path.touch()

    def add(self, rows: Sequence[bytes]) -> None:
        num_buckets = len(self.paths)
        for row in rows:
            self._rows[int(row[:8], 16) * num_buckets >> 32].append(row)
            self._buffered_bytes += len(row)
        if self._buffered_bytes > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        for path, rows in zip(self.paths, self._rows, strict=True):
            if rows:
                with path.open("ab") as file:
                    file.write(b"".join(rows))
                rows.clear()
        self._buffered_bytes = 0


def _remove_duplicates(on_duplicate: str, path: Path) -> tuple[list[bytes], int, int]:
    """Return the rows of the distinct molecules of a bucket without hashes, and delete the bucket.

    The id is that of the first duplicate, the key the lowest of all. Also returns the number of duplicates, and the
    size of the bucket in bytes.
    """
    data = path.read_bytes()
    path.unlink()
    lines = _rows(data)
    distinct: dict[bytes, bytes] = {}
    for line in lines:
        molecule, row = line[:_HASH_DIGITS], line[_HASH_DIGITS + 1 :]
        other = distinct.setdefault(molecule, row)
        if other is row:
            continue
        if on_duplicate == "error":
            (first, smiles), (second, _) = (
                each[_KEY_DIGITS + 1 : -1].decode().rsplit(",", 1) for each in (other, row)
            )
            raise UserError(
                f"{first} and {second} are the same molecule, {smiles}: remove one, or set on_duplicate=skip or keep"
            )
        distinct[molecule] = min(other[:_KEY_DIGITS], row[:_KEY_DIGITS]) + other[_KEY_DIGITS:]
    return list(distinct.values()), len(lines) - len(distinct), len(data)


def _sort_bucket(path: Path) -> int:
    """Sort a bucket by the keys and remove them; return the size of the bucket in bytes."""
    data = path.read_bytes()
    path.write_bytes(b"".join(row[_KEY_DIGITS + 1 :] for row in sorted(_rows(data))))
    return len(data)


def _rows(data: bytes) -> list[bytes]:
    return [row + b"\n" for row in data.split(b"\n")[:-1]]


def _write_shards(output: StagedOutput, buckets: Sequence[Path], shards: Sequence[dict[str, int]]) -> None:
    with progress("writing molecules", sum(path.stat().st_size for path in buckets)) as advance:
        rows = _sorted_rows(buckets, advance)
        for number, sizes in enumerate(shards):
            for split, count in sizes.items():
                if count:
                    name = f"{split}/x{number:03}.csv"
                    parts = chain([_HEADER], islice(rows, count))
                    output.manifest.files[name] = write_with_checksum(output.path(name), parts, count)


def _sorted_rows(buckets: Iterable[Path], advance: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the rows of all sorted buckets; a bucket is deleted after it has been read into memory."""
    for path in buckets:
        data = path.read_bytes()
        path.unlink()
        yield from _rows(data)
        advance(len(data))
