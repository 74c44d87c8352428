# SPDX-License-Identifier: Apache-2.0
"""Index a FASTA file (MB/s) or read sequences at random (sequences/s) with one library; print one JSON line.

`sqlite` is the store of BioNeMo v2: one table of id and sequence, read by id.
"""

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

READS, BATCH = 200_000, 64


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bionemo(fasta: Path, what: str, order: np.ndarray, scratch: Path) -> float:
    """Measure our memory-mapped offset index, reading batches of 64 like the data pipeline."""
    from bionemo.data.shards.formats import Fasta
    from bionemo.data.shards.records import TextRecords

    def index() -> None:
        TextRecords([fasta], Fasta(), index_mapping_dir=scratch / "index")

    if what == "index":
        return timed(index)
    source = TextRecords([fasta], Fasta(), index_mapping_dir=scratch / "index")
    records = order % len(source)

    def read() -> None:
        for start in range(0, READS, BATCH):
            chosen = records[start : start + BATCH]
            counts = source.lengths[chosen].astype(np.int64)
            ends = np.cumsum(counts)
            source.gather(chosen, np.zeros_like(counts), counts, np.empty(ends[-1], np.uint8), ends - counts)

    return timed(read)


def pyfastx(fasta: Path, what: str, order: np.ndarray, scratch: Path) -> float:
    """Measure the index and reader of BioNeMo v1."""
    import pyfastx as library

    def index() -> object:
        return library.Fasta(str(fasta), index_file=str(scratch / "data.fxi"))

    seconds = timed(index)
    if what == "index":
        return seconds
    records = index()
    names = (order % len(records)).tolist()  # type: ignore[arg-type]
    return timed(lambda: [records[name].seq for name in names])  # type: ignore[index]


def sqlite(fasta: Path, what: str, order: np.ndarray, scratch: Path) -> float:
    """Measure a database of id and sequence."""
    connection = sqlite3.connect(scratch / "data.sqlite")

    def build() -> None:
        entries = (entry.split("\n", 1) for entry in fasta.read_text().split(">")[1:])
        connection.execute("create table protein (id text primary key, sequence text)")
        rows = ((header.split()[0], body.replace("\n", "")) for header, body in entries)
        connection.executemany("insert into protein values (?, ?)", rows)
        connection.commit()

    seconds = timed(build)
    if what == "index":
        return seconds
    ids = [row[0] for row in connection.execute("select id from protein")]
    names = [ids[i] for i in (order % len(ids)).tolist()]
    query = "select sequence from protein where id = ?"
    return timed(lambda: [connection.execute(query, (name,)).fetchone()[0] for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["bionemo", "pyfastx", "sqlite"], required=True)
    parser.add_argument("--what", choices=["index", "access"], required=True)
    parser.add_argument("--fasta", type=Path, required=True)
    options = parser.parse_args()

    order = np.random.default_rng(0).integers(0, 2**31, READS)
    options.fasta.read_bytes()  # warm the page cache
    with tempfile.TemporaryDirectory() as scratch:
        run = {"bionemo": bionemo, "pyfastx": pyfastx, "sqlite": sqlite}[options.library]
        seconds = run(options.fasta, options.what, order, Path(scratch))
    size = options.fasta.stat().st_size / 1e6
    value, unit = (size / seconds, "MB/s") if options.what == "index" else (READS / seconds, "sequences/s")
    print(json.dumps({"value": value, "unit": unit}))


if __name__ == "__main__":
    main()
