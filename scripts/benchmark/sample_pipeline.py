# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the sample pipeline against Hugging Face's tokenizer and masking collator, alternately.

    python sample_pipeline.py --fasta proteins.fasta --repeats 5

Both shuffle, tokenize, pack or pad, and mask the same sequences in one thread. Ours reads them from a mapped file;
the peer has them in memory as text. Padding tokens are not counted.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
import torch
from proteins import proteins
from transformers import DataCollatorForLanguageModeling, EsmTokenizer, logging

import bionemo.tokenizers
from bionemo.data.collate import Collator
from bionemo.data.loader import StepDataset, StepLoader
from bionemo.data.packing import pack
from bionemo.data.proteins.masking import MaskedDataset, ResidueMasker
from bionemo.data.proteins.splits import Split
from bionemo.data.sampler import DataPosition, GlobalBatchSampler, SampleStream
from bionemo.data.shards.formats import Fasta
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.source import SequenceSource
from bionemo.tokenizers import load_tokenizer

LENGTH, SPECIAL = 1024, 2
VOCABULARY = Path(bionemo.tokenizers.__file__).parent / "vocab" / "esm2nv.txt"


def ours(source: SequenceSource, rows: int, workers: int) -> Iterator[int]:
    """Yield the number of tokens in each batch of `rows` rows."""
    alphabet = load_tokenizer("esm2nv")
    split = Split(source, np.arange(len(source)), np.zeros(256, np.int64), (), seed=1, crop=True)
    samples = MaskedDataset(split, alphabet, LENGTH, ResidueMasker(alphabet, 0.15, 0.8, 0.1))
    stream = SampleStream(samples.records, seed=1)
    sampler = GlobalBatchSampler(stream, samples.lengths, pack, LENGTH, rows, packing_window=2048)
    collate = Collator(samples, rows, alphabet.pad_id)
    steps = StepDataset(sampler, collate, DataPosition(), rank=0, ranks=1, num_micro_batches=1)
    for step in StepLoader(steps, workers=workers, timeout=60, pin_memory=False):
        yield sum(batch.num_tokens for batch in step.micro_batches)


def peer(sequences: list[str], rows: int) -> Iterator[int]:
    """Yield the number of tokens in each batch of as many sequences as fit into `rows` rows of ours."""
    tokenizer = EsmTokenizer(VOCABULARY)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15)
    sequences = random.Random(1).sample(sequences, len(sequences))
    held = round(rows * LENGTH / np.mean([min(len(text), LENGTH - SPECIAL) + SPECIAL for text in sequences]))
    texts = cycle(sequences)
    while True:
        batch = [next(texts) for _ in range(max(1, held))]
        columns = tokenizer(batch, truncation=True, max_length=LENGTH, return_special_tokens_mask=True)
        examples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        yield int(collate(examples)["attention_mask"].sum())


def rate(batches: Iterator[int], seconds: float) -> float:
    """Return million tokens per second."""
    next(batches)  # one-time initialization
    tokens, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        tokens += next(batches)
    return tokens / spent / 1e6


def summary(values: list[float]) -> str:
    """Format median and range."""
    return f"{median(values):8.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", help="sequences to measure with; by default random ones with UniRef's lengths")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 64], help=f"rows of {LENGTH} tokens a batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="loader processes, of ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()

    sequences = proteins(options.fasta, 8000)
    with tempfile.TemporaryDirectory() as scratch:
        fasta = Path(scratch) / "proteins.fasta"
        fasta.write_text("".join(f">{i}\n{text}\n" for i, text in enumerate(sequences)))
        source = TextRecords([fasta], Fasta())
        for rows in options.rows:
            rates: dict[str, list[float]] = {}
            for _ in range(options.repeats):
                for workers in options.workers:
                    found = rate(ours(source, rows, workers), options.seconds)
                    rates.setdefault(f"ours, {workers} workers", []).append(found)
                rates.setdefault("peer", []).append(rate(peer(sequences, rows), options.seconds))
            print(f"{rows * LENGTH:,} tokens a batch, in million tokens a second")
            for name, values in rates.items():
                ratios = [a / b for a, b in zip(values, rates["peer"], strict=True)]
                print(f"  {name:15} {summary(values):32}  ratio {summary(ratios)}")


if __name__ == "__main__":
    main()
