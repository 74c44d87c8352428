# SPDX-License-Identifier: Apache-2.0
"""Choose which sequences are packed into one row.

BioNeMo v1 padded every sequence to `seq_length` tokens. Here a row of `seq_length` tokens contains as many whole
sequences as fit. Packing precedes the assignment to ranks and micro-batches and does not depend on it.
"""

from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute


def pack(lengths: NDArray[np.integer[Any]], max_length: int, key: int) -> list[NDArray[np.int64]]:
    """Pack sequences by best-fit decreasing: each goes to the fullest row with space for it (Johnson 1973).

    With UniRef lengths and 2,048 sequences in a packing window, rows of 512 tokens are 98.7 % full and those of 1,024
    tokens are 99.7 % full.

    Args:
        lengths: [n] tokens of each sequence, at most `max_length`.
        max_length: maximum number of tokens in a row.
        key: random key that shuffles the rows; otherwise each window would start with the longest sequences.

    Returns:
        The indices of the sequences in each row.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(max_length + 1)]  # rows by their remaining space
    spaces = 0  # bit s is set if a row has s tokens left: one shift finds the tightest fit
    decreasing = np.argsort(-lengths, kind="stable")
    for sequence, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
            rows[row].append(sequence)
        else:
            row, space = len(rows), max_length
            rows.append([sequence])
        if space > length:
            by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    flat = np.array(list(chain.from_iterable(rows)), np.int64)
    bounds = list(accumulate(map(len, rows), initial=0))
    shuffled = permute(np.arange(len(rows)), len(rows), key).tolist()
    return [flat[bounds[row] : bounds[row + 1]] for row in shuffled]


def pad(lengths: NDArray[np.integer[Any]], max_length: int, key: int) -> list[NDArray[np.int64]]:
    """Put each sequence in a row of its own, in order; same signature as `pack`."""
    return list(np.arange(len(lengths))[:, None])
