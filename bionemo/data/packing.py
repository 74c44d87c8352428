# SPDX-License-Identifier: Apache-2.0
"""Which sequences share a row.

A row is `seq_length` tokens, what the predecessor spent on one padded sequence; here it holds as many whole sequences
as fit. Rows are planned for a window of sequences at once, before they are dealt to ranks and micro-batches, so the
plan does not depend on the layout.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bionemo.data.random_stream import permute

Rows = list[NDArray[np.int64]]  # for each row, which sequences of the window it holds


def pack(lengths: NDArray[np.int64], capacity: int, key: int) -> Rows:
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
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            row, room = len(rows), capacity
            rows.append([])
        rows[row].append(sequence)
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return _shuffled([np.array(row, np.int64) for row in rows], key)


def pad(lengths: NDArray[np.int64], capacity: int, key: int) -> Rows:
    """One sequence a row, in the order of the window."""
    return [np.array([sequence], np.int64) for sequence in range(len(lengths))]


def _shuffled(rows: Sequence[NDArray[np.int64]], key: int) -> Rows:
    return [rows[i] for i in permute(np.arange(len(rows)), len(rows), key)] if rows else []
