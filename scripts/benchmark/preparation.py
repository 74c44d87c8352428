# SPDX-License-Identifier: Apache-2.0
"""Convert a FASTA file to shuffled CSV shards, or only read it, with one library; print MB/s as one JSON line.

    python preparation.py --write proteins.fasta --sequences 5000000
    python preparation.py bionemo proteins.fasta

`bionemo` is the complete command, including start-up and checks. `pyfastx` does what BioNeMo v1 did: build an index,
then fetch every record in shuffled order and write it. `pyfastx-read` builds the index and reads every sequence;
`pyfastx-stream` and `biopython-read` read the sequences one after the other.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

SPLIT = {"val": 5_000, "test": 20_000}
SHARDS = 50


def write_fasta(path: Path, number: int) -> None:
    """Write random residues with UniRef50's lengths (lognormal, median 206, mean 250) and UniProt-like headers."""
    random = np.random.default_rng(1)
    pool = np.frombuffer(b"LAGVSERTIDPKQNFYMHWC", np.uint8)[random.integers(0, 20, 1 << 24)]
    with path.open("wb") as file:
        for begin in range(0, number, 100_000):
            count = min(100_000, number - begin)
            lengths = np.clip(random.lognormal(5.33, 0.62, count), 12, 35_000).astype(int)
            starts = random.integers(0, len(pool) - 35_000, count)
            for index, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True), begin):
                name = f"A0A{index:09X}"
                file.write(b">UniRef50_%b Uncharacterized protein n=1 Tax=Bacteria TaxID=2 RepID=%b_9BACT\n"
                           % (name.encode(), name.encode()))  # fmt: skip
                letters = pool[start : start + length].tobytes()
                file.write(b"\n".join(letters[at : at + 60] for at in range(0, length, 60)) + b"\n")


def bionemo(fasta: Path, scratch: Path) -> None:
    """Prepare with `bionemo preprocess`."""
    sizes = [f"{split}_size={size}" for split, size in SPLIT.items()]
    command = [sys.executable, "-m", "bionemo.preprocess", f"source={fasta}", f"output={scratch / 'out'}", *sizes]
    subprocess.run([*command, f"num_csv_files={SHARDS}"], check=True, stdout=subprocess.DEVNULL)


def pyfastx(fasta: Path, scratch: Path) -> None:
    """Prepare as BioNeMo v1 did."""
    import pyfastx as library

    records = library.Fasta(str(fasta), index_file=str(scratch / "data.fxi"), uppercase=True)
    order = np.arange(len(records))
    np.random.default_rng(0).shuffle(order)
    val, test = SPLIT["val"], SPLIT["val"] + SPLIT["test"]
    for split, part in (("val", order[:val]), ("test", order[val:test]), ("train", order[test:])):
        (scratch / split).mkdir()
        for number, shard in enumerate(np.array_split(part, SHARDS)):
            with (scratch / split / f"x{number:03}.csv").open("w") as file:
                writer = csv.writer(file)
                writer.writerow(["record_id", "record_name", "sequence_length", "sequence"])
                writer.writerows([r.id, r.name, len(r.seq), r.seq] for r in map(records.__getitem__, shard.tolist()))


def pyfastx_read(fasta: Path, scratch: Path) -> None:
    """Build an index and read every sequence."""
    import pyfastx as library

    for record in library.Fasta(str(fasta), index_file=str(scratch / "data.fxi")):
        len(record.seq)


def pyfastx_stream(fasta: Path, scratch: Path) -> None:
    """Read without an index."""
    import pyfastx as library

    for _, sequence, *_ in library.Fastx(str(fasta)):
        len(sequence)


def biopython_read(fasta: Path, scratch: Path) -> None:
    """Read with Biopython's record parser."""
    from Bio import SeqIO

    for record in SeqIO.parse(fasta, "fasta"):
        len(record.seq)


PEERS = {function.__name__.replace("_", "-"): function
         for function in (bionemo, pyfastx, pyfastx_read, pyfastx_stream, biopython_read)}  # fmt: skip


def peak_memory(work: Callable[[], None]) -> int:
    """Return the peak memory in bytes of this process and its descendants, sampled ten times per second."""
    here, peak, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            held = 0
            for process in (here, *here.children(recursive=True)):
                try:
                    held += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=PEERS)
    parser.add_argument("fasta", nargs="?", type=Path)
    parser.add_argument("--write", type=Path, help="make such a file, and stop")
    parser.add_argument("--sequences", type=int, default=5_000_000)
    options = parser.parse_args()
    if options.write:
        write_fasta(options.write, options.sequences)
        return
    with tempfile.TemporaryDirectory(dir=options.fasta.parent) as scratch:
        begin = time.perf_counter()
        peak = peak_memory(lambda: PEERS[options.library](options.fasta.resolve(), Path(scratch)))
        seconds = time.perf_counter() - begin
    size = options.fasta.stat().st_size
    print(json.dumps({"value": size / seconds / 1e6, "unit": "MB/s", "seconds": seconds, "peak_mb": peak / 1e6}))


if __name__ == "__main__":
    main()
