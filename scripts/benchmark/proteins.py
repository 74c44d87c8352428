# SPDX-License-Identifier: Apache-2.0
"""Sequences for benchmarks, from a FASTA file or random residues with UniRef90's lengths, and sizes of ESM-2."""

from pathlib import Path

import numpy as np

ESM2_SIZES = {"8M": (6, 320, 20), "35M": (12, 480, 20), "150M": (30, 640, 20), "650M": (33, 1280, 20)}
"""Layers, hidden size and heads."""
SIZES = {**ESM2_SIZES, "ESMC-12": (12, 320, 5)}
ESM2_TOKENS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]


def proteins(fasta: str | None, number: int, seed: int = 0) -> list[str]:
    """Return `number` sequences; without a file, lengths are lognormal (median 210, mean 278)."""
    if fasta:
        records = Path(fasta).read_text().split(">")[1:]
        return ["".join(record.splitlines()[1:]) for record in records[:number]]
    random = np.random.default_rng(seed)
    lengths = np.maximum(random.lognormal(np.log(210), np.sqrt(2 * np.log(278 / 210)), number), 20).astype(int)
    letters = np.frombuffer(b"LAGVSERTIDPKQNFYMHWC", np.uint8)
    return [letters[random.integers(0, 20, length)].tobytes().decode() for length in lengths]
