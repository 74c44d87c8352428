# SPDX-License-Identifier: Apache-2.0
"""Prepare ZINC15 tranches, or other SMILES files, as shards of distinct canonical SMILES in random order.

Duplicates have the same canonical SMILES: rows are distributed to buckets by its hash, and each bucket is searched in
memory. The others are sorted by a seeded hash of their SMILES in the file, which shuffles them, again in buckets. The
order depends neither on the number of processes nor, except for the ids of duplicates, on the order of the files. It
does not depend on the version of RDKit, whose canonical SMILES change between releases.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
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
from bionemo.preparation.inputs import is_gzipped
from bionemo.preparation.manifest import RecordCounts, checksum_file, write_with_checksum
from bionemo.preparation.molecules import SmilesBlock, canonical_smiles, fetch_tranches, find_tranches, read_smiles
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import absolute_source, is_url, redact_url

_HEADER = b"zinc_id,smiles\n"
_BUCKET_BYTES = 32 << 20  # bytes of input per bucket
_BUFFER_BYTES = 64 << 20  # rows are buffered, so that buckets are written in long runs
_HASH_DIGITS = 32  # 128 bits: a collision among 1.5 billion molecules has a probability of 10^-20
_KEY_DIGITS = 16  # 64 bits: rows with the same key are sorted by their content
_GZIP_RATIO = 5  # estimate


class _Part(NamedTuple):
    """The result of a task: rows for the next step, record counts, and the number of bytes that were read.

    A row is `hash of the canonical SMILES,key of the order,id,canonical SMILES`; without the hash when duplicates have
    been removed.
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
    known = find_tranches(job.source, raw)
    sources = None if known is None else [absolute_source(found) for _, found in known]
    with stage_output(job.output, "zinc", parameters, SPLITS, sources=sources, force=job.force) as output:
        if output is None:
            return
        files = fetch_tranches(job.source, raw)
        counts = output.add_counts(redact_url(job.source), *SPLITS)
        size = sum(path.stat().st_size * (_GZIP_RATIO if is_gzipped(path) else 1) for path, _ in files)
        output.require_space(size)
        blocks = read_smiles(_add_inputs(files, output), job.sequence_column, job.id_column)
        parts = map_ordered(partial(_parse_block, job), blocks, job)
        buckets = _distribute("reading molecules", parts, output.scratch / "molecules", size, counts)
        limit = len(buckets)  # of processes: starting one takes longer than a bucket
        parts = map_ordered(partial(_remove_duplicates, job.on_duplicate), buckets, job, limit)
        buckets = _distribute("removing duplicates", parts, output.scratch / "distinct", size, counts)
        counts.written = counts.read - sum(counts.dropped.values())
        counts.dropped = {reason: count for reason, count in sorted(counts.dropped.items()) if count}
        lost = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.items())
        shards = shard_sizes(counts.written, job.train_size, job.val_size, job.test_size, lost)
        with closing(map_ordered(_sort_bucket, buckets, job, limit)) as sorted_buckets:
            _write_shards(
                output, chain.from_iterable(sorted_buckets), shards, sum(path.stat().st_size for path in buckets)
            )


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
    for path, source in files:
        display_path = redact_url(source)
        output.add_input(path, display_path, checksum_file(path))
        yield path, display_path


def _parse_block(job: ZincJob, block: SmilesBlock) -> _Part:
    seed = purpose_key(job.seed, "molecules")
    rows: list[bytes] = []
    dropped: Counter[str] = Counter()
    for line, text, name in block.rows():
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
            place = f" {block.file}:{line}" if job.on_duplicate == "keep" else ""  # makes every hash unique
            molecule = xxhash.xxh3_128_hexdigest(f"{smiles}{place}".encode())
            key = xxhash.xxh3_64_hexdigest(f"{text}{place}".encode(), seed=seed)
            rows.append(f"{molecule},{key},{_quote(name)},{smiles}\n".encode())
    return _Part(rows, len(rows) + dropped.total(), dropped, block.lines.size)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set(name) & {",", '"', "\r"} else name


def _distribute(
    label: str, parts: Generator[_Part, None, None], directory: Path, size: int, counts: RecordCounts
) -> list[Path]:
    """Write the rows of tasks, of about `size` bytes, to files by their first digits, and count their records.

    Returns the files, in ascending order of the digits; their rows are in the order of the tasks.
    """
    directory.mkdir()
    paths = [directory / f"{index:06}.rows" for index in range(size // _BUCKET_BYTES + 1)]
    buffers: list[list[bytes]] = [[] for _ in paths]

    def flush() -> None:
        for path, rows in zip(paths, buffers, strict=True):
            with path.open("ab") as file:
                file.write(b"".join(rows))
            rows.clear()

    buffered_bytes = 0
    with progress(label, size) as advance, closing(parts):
        for part in parts:
            for row in part.rows:
                buffers[int(row[:8], 16) * len(paths) >> 32].append(row)
            buffered_bytes += sum(map(len, part.rows))
            if buffered_bytes > _BUFFER_BYTES:
                flush()
                buffered_bytes = 0
            counts.read += part.read
            for reason, count in part.dropped.items():
                counts.drop(reason, count)
            advance(part.size)
    flush()
    return paths


def _remove_duplicates(on_duplicate: str, path: Path) -> _Part:
    """Return the rows of the distinct molecules of a bucket without hashes, and delete the bucket.

    The id is that of the first duplicate, the key the lowest of all.
    """
    lines = _take_rows(path)
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
    dropped = Counter(duplicate=len(lines) - len(distinct))
    return _Part([*distinct.values()], 0, dropped, sum(map(len, lines)))


def _sort_bucket(path: Path) -> list[bytes]:
    """Return the rows of a bucket, sorted by their keys and without them, and delete the bucket."""
    return [row[_KEY_DIGITS + 1 :] for row in sorted(_take_rows(path))]


def _take_rows(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        rows = file.readlines()
    path.unlink()
    return rows


def _write_shards(output: StagedOutput, rows: Iterator[bytes], shards: Sequence[dict[str, int]], size: int) -> None:
    with progress("writing molecules", size) as advance:
        for number, sizes in enumerate(shards):
            for split, count in sizes.items():
                if count:
                    name = f"{split}/x{number:03}.csv"
                    parts = chain([_HEADER], islice(rows, count))
                    output.manifest.files[name] = write_with_checksum(output.path(name), parts, count)
                    advance(output.manifest.files[name].size)
