# SPDX-License-Identifier: Apache-2.0
"""Indexed datasets as Megatron-Core writes them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np


def write_indexed(prefix: Path, documents: Iterable[Sequence[Sequence[int]]], dtype: type = np.uint16) -> Path:
    """Write documents of sequences of ids with Megatron's builder; return the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    import bionemo.megatron  # noqa: F401  # prepares the host

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for sequences in documents:
        ids = np.array([number for sequence in sequences for number in sequence], dtype)
        builder.add_document(ids, [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return prefix
