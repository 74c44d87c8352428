# SPDX-License-Identifier: Apache-2.0
"""Sequences of more tokens than a model reads: cut, read in pieces, left out, or refused; never silently."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.inference.batching import Ids
from bionemo.inference.outputs import PER_SEQUENCE, Columns

Policy = Literal["truncate", "split", "drop", "error"]


class Fitted(NamedTuple):
    """Sequences as they are computed.

    Attributes:
        pieces: tokens of each piece, in order.
        owners: [pieces] int64, which sequence each is of.
        kept: numbers of the sequences that are left.
        long: numbers of those that were too long.
    """

    pieces: list[Ids]
    owners: np.ndarray
    kept: list[int]
    long: list[int]


def fit(sequences: Sequence[Ids], names: Sequence[str], room: int, policy: Policy) -> Fitted:
    """Apply the policy.

    Args:
        sequences: tokens of each, without begin and end.
        names: what each is called.
        room: tokens that the model reads.
        policy: `truncate` keeps the beginning, `split` makes pieces of equal length, `drop` leaves out.

    Raises:
        UserError: when the policy is `error` and one is too long.
    """
    pieces: list[Ids] = []
    owners: list[int] = []
    kept: list[int] = []
    long = [number for number, ids in enumerate(sequences) if len(ids) > room]
    if long and policy == "error":
        raise too_long(names[long[0]], len(sequences[long[0]]), room)
    for number, ids in enumerate(sequences):
        if len(ids) > room and policy == "drop":
            continue
        parts = np.array_split(ids, -(-len(ids) // room)) if policy == "split" else [ids[:room]]
        pieces += parts
        owners += [len(kept)] * len(parts)
        kept.append(number)
    return Fitted(pieces, np.array(owners, np.int64), kept, long)


def too_long(name: str, tokens: int, room: int) -> UserError:
    """What is told of a sequence that has too many tokens."""
    return UserError(
        f"{name} has {tokens:,} tokens, the model reads {room:,} at most: set model.data.long_sequences to truncate, "
        "split or drop"
    )


def join(columns: Columns, fitted: Fitted) -> tuple[Columns, np.ndarray]:
    """Put what was computed of pieces together.

    Of a sequence in several pieces, the mean over all tokens stands for it, for its perplexity that of their
    log-likelihoods, and the first piece's token of begin.

    Returns:
        The columns, and tokens of each sequence, int64 [k].
    """
    sizes = np.array([len(piece) for piece in fitted.pieces], np.int64)
    tokens = np.bincount(fitted.owners, sizes, minlength=len(fitted.kept)).astype(np.int64)
    if len(sizes) == len(tokens):
        return columns, tokens
    first = np.searchsorted(fitted.owners, np.arange(len(tokens)))
    joined = dict(columns)
    for name in columns.keys() & set(PER_SEQUENCE):
        values = columns[name]
        if name == "begin":
            joined[name] = values[first]
            continue
        values = np.log(values) if name == "pseudo_perplexity" else values
        whole = sizes == tokens[fitted.owners]  # whose mean is not to change by a bit
        weights = np.where(whole, 1.0, sizes / tokens[fitted.owners]).reshape(-1, *[1] * (values.ndim - 1))
        means = np.add.reduceat(values.astype(np.float64) * weights, first)
        means = np.exp(means) if name == "pseudo_perplexity" else means
        joined[name] = np.where(
            whole[first].reshape(-1, *[1] * (values.ndim - 1)), columns[name][first], means
        ).astype(np.float32)
    return joined, tokens
