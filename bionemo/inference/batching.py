# SPDX-License-Identifier: Apache-2.0
"""Tokenization for inference (one token per residue or atom) and batches of bounded size."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.data.table import is_missing_sequence
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Alphabet, SmilesTokenizer, TokenTable, Vocabulary
from bionemo.tokenizers.residues import check_letters, trim
from bionemo.tokenizers.smiles import end_at_space

Ids = NDArray[np.integer[Any]]
_NONE = np.zeros(0, np.int64)


class BatchLimits(NamedTuple):
    """Maximum size of a batch. Results do not depend on it."""

    tokens: int = 1 << 13
    sequences: int | None = None


DEFAULT_LIMITS = BatchLimits()
# Minimum number of rows of a matrix product: libraries use other kernels for few rows, which round differently.
MIN_ROWS = 64
# Maximum size of an activation on a CPU. Larger ones do not stay in the cache, and glibc gives memory blocks from
# 32 MiB back to the kernel as soon as they are free, which then has to clear pages for the next one.
_CPU_ACTIVATION = 16 << 20


def tokenize(vocabulary: Vocabulary, text: str, name: str) -> Ids:
    """Return the token ids of a text, without begin and end tokens; `name` identifies the text in errors.

    Each letter of a protein is one token, also if it is unknown. White space and `*` at the end are ignored. A SMILES
    ends at the first white space.

    Raises:
        UserError: if the text is empty or a missing value such as nan, or is a protein without a known letter, with a
            special token or with other letters than ASCII.
    """
    if is_missing_sequence(text):
        raise UserError(f"{name} is {text.strip()!r}, a missing value: remove it, or add its sequence")
    if isinstance(vocabulary, Alphabet):  # in training, a run of unknown letters is one token
        letters = trim("".join(text.split()).encode())
        check_letters(letters, name)
        ids: Ids = vocabulary.table[np.frombuffer(letters, np.uint8)]
    elif isinstance(vocabulary, SmilesTokenizer):
        ids = vocabulary.encode(end_at_space(text))
    else:
        ids = vocabulary.encode(text.strip())
    if not len(ids):
        raise UserError(f"{name} is empty: remove it, or add its sequence")
    if isinstance(vocabulary, Alphabet) and (ids == vocabulary.unk_id).all():
        shown = repr(text.strip()[:30])
        raise UserError(f"{name} contains no letter of the vocabulary ({shown}): check that it is a sequence")
    return ids


def max_tokens(model: LanguageModel) -> int:
    """Return the maximum number of tokens of a sequence, without begin and end tokens."""
    return model.config.max_position_embeddings - 2 * model.has_bos_eos


def too_long_error(name: str, length: int, max_length: int, remedy: str, unit: str = "tokens") -> UserError:
    """Return the error for a sequence of more than `max_length` tokens; `remedy` says how to fix it."""
    limit = f"the model accepts at most {max_length:,} without begin and end tokens"
    return UserError(f"{name} has {length:,} {unit}, but {limit}: {remedy}")


def add_special_tokens(model: LanguageModel, ids: Ids) -> Ids:
    """Add begin and end tokens if the model uses them."""
    if not model.has_bos_eos:
        return ids
    assert isinstance(model.vocabulary, TokenTable)
    return np.concatenate([[model.vocabulary.bos_id], ids, [model.vocabulary.eos_id]]).astype(ids.dtype)


def fit_to_device(model: LanguageModel, limits: BatchLimits) -> BatchLimits:
    """Reduce the number of tokens on a CPU such that the largest fp32 activation fits `_CPU_ACTIVATION`."""
    if next(model.parameters()).device.type != "cpu":
        return limits
    return limits._replace(tokens=min(limits.tokens, _CPU_ACTIVATION // (4 * model.config.ffn_hidden_size)))


def split_batches(lengths: Sequence[int], limits: BatchLimits) -> Iterator[slice]:
    """Split a list of sequences into consecutive batches; a sequence above the limit is a batch of its own."""
    begin = total = 0
    for number, length in enumerate(lengths):
        if total and (total + length > limits.tokens or number - begin == limits.sequences):
            yield slice(begin, number)
            begin, total = number, 0
        total += length
    if total:
        yield slice(begin, len(lengths))


def pack(model: LanguageModel, sequences: Sequence[Ids]) -> PackedBatch:
    """Concatenate sequences on the device of the model, with padding up to MIN_ROWS tokens."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    padding = np.full(max(MIN_ROWS - int(lengths.sum()), 0), model.vocabulary.pad_id)
    ids = np.concatenate([_NONE, *sequences, padding])
    max_length = max(model.config.max_position_embeddings, int(lengths.max(initial=0)))
    return TokenizedBatch(TokenSequences(ids, lengths, max_length)).unpack().to(next(model.parameters()).device)
