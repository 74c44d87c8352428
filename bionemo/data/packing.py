# SPDX-License-Identifier: Apache-2.0
"""Which sequences share a row.

A row is `seq_length` tokens, what the predecessor spent on one padded sequence; here it holds as many whole sequences
as fit. Rows are planned for a window of sequences at once, before they are dealt to ranks and micro-batches, so the
plan does not depend on the layout.
"""

from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute

Rows = list[NDArray[np.int64]]  # for each row, which sequences of the window it holds


def pack(lengths: NDArray[np.integer[Any]], capacity: int, key: int) -> Rows:
    """Best-fit decreasing: the longest sequence left goes where the least room remains (Johnson 1973).

    On UniRef lengths, 2,048 sequences at a time, rows of 512 are 98.7 % full and rows of 1,024 are 99.7 % full.

    Args:
        lengths: [n] tokens of each sequence, none over capacity.
        capacity: tokens of a row.
        key: random key of the window. Rows come out longest sequences first; the key shuffles them, or every window
            would start with the long ones.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room they have left
    rooms = 0  # bit r is set when some row has room r: finding the tightest fit is one shift
    order = np.argsort(-lengths, kind="stable")
    for sequence, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            rows[row].append(sequence)
        else:
            row, room = len(rows), capacity
            rows.append([sequence])
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
    flat = np.array(list(chain.from_iterable(rows)), np.int64)
    bounds = list(accumulate(map(len, rows), initial=0))
    shuffled = permute(np.arange(len(rows)), len(rows), key).tolist()
    return [flat[bounds[row] : bounds[row + 1]] for row in shuffled]


def pad(lengths: NDArray[np.integer[Any]], capacity: int, key: int) -> Rows:
    """One sequence a row, in the order of the window."""
    return list(np.arange(len(lengths))[:, None])
