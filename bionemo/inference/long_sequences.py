# SPDX-License-Identifier: Apache-2.0
"""Sequences longer than the model's maximum length: truncate, split into pieces, drop, or raise an error."""

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from bionemo.config.schema.infer import split_output
from bionemo.inference.batching import Ids, too_long_error
from bionemo.inference.outputs import PER_SEQUENCE, OutputArrays

log = logging.getLogger(__name__)
Policy = Literal["truncate", "split", "drop", "error"]
SET_POLICY = "set model.data.long_sequences to truncate, split or drop"


class FittedSequences(NamedTuple):
    """Sequences after the policy was applied."""

    pieces: list[Ids]  # token ids of each piece, in order
    owners: np.ndarray  # [pieces] int64, index into `kept` of each piece's sequence
    kept: list[int]  # numbers of the sequences that remain
    long: list[int]  # numbers of the sequences that exceeded the maximum length


def apply_policy(sequences: Sequence[Ids], names: Sequence[str], max_length: int, policy: Policy) -> FittedSequences:
    """Apply the policy for sequences of more than `max_length` tokens, without begin and end tokens.

    `truncate` keeps the beginning, `split` makes pieces of equal length, `drop` removes the sequence.

    Raises:
        UserError: if the policy is `error` and a sequence is too long.
    """
    pieces: list[Ids] = []
    owners: list[int] = []
    kept: list[int] = []
    long = [number for number, ids in enumerate(sequences) if len(ids) > max_length]
    if long and policy == "error":
        raise too_long_error(names[long[0]], len(sequences[long[0]]), max_length, SET_POLICY)
    for number, ids in enumerate(sequences):
        if len(ids) > max_length and policy == "drop":
            continue
        parts = np.array_split(ids, -(-len(ids) // max_length)) if policy == "split" else [ids[:max_length]]
        pieces += parts
        owners += [len(kept)] * len(parts)
        kept.append(number)
    return FittedSequences(pieces, np.array(owners, np.int64), kept, long)


def note_long(name: str, count: int, max_length: int, policy: Policy, remedy: str = "") -> None:
    """Log that `count` sequences, of which `name` is the first, have more than `max_length` tokens."""
    action = {"truncate": "truncated", "split": "split into pieces", "drop": "dropped"}[policy]
    more = f" and {count - 1:,} more" if count > 1 else ""
    log.warning("%s%s: more than %d tokens without begin and end, %s%s", name, more, max_length, action, remedy)


def join_pieces(columns: OutputArrays, fitted: FittedSequences) -> tuple[OutputArrays, np.ndarray]:
    """Combine the outputs of pieces.

    Embeddings are averaged over all tokens, pseudo-perplexities are combined through their log-likelihoods, and the
    begin token is that of the first piece.

    Returns:
        The outputs, and the number of tokens of each sequence, int64 [k].
    """
    sizes = np.array([len(piece) for piece in fitted.pieces], np.int64)
    tokens = np.bincount(fitted.owners, sizes, minlength=len(fitted.kept)).astype(np.int64)
    if len(sizes) == len(tokens):
        return columns, tokens
    first = np.searchsorted(fitted.owners, np.arange(len(tokens)))
    joined = dict(columns)
    for name in columns:
        values, (kind, _) = columns[name], split_output(name)
        if kind not in PER_SEQUENCE:
            continue
        if kind == "begin":
            joined[name] = values[first]
            continue
        values = np.log(values) if name == "pseudo_perplexity" else values
        single = sizes == tokens[fitted.owners]  # sequences of one piece: their values stay bitwise the same
        shape = (-1, *[1] * (values.ndim - 1))
        weights = np.where(single, 1.0, sizes / tokens[fitted.owners]).reshape(shape)
        means = np.add.reduceat(values.astype(np.float64) * weights, first)
        means = np.exp(means) if name == "pseudo_perplexity" else means
        joined[name] = np.where(single[first].reshape(shape), columns[name][first], means).astype(np.float32)
    return joined, tokens
