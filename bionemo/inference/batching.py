# SPDX-License-Identifier: Apache-2.0
"""Texts as a trained model reads them: one token for each residue or atom, and so many texts at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Parts, Stream, assemble
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Alphabet, TokenTable, Vocabulary

Ids = NDArray[np.integer[Any]]
_NONE = np.zeros(0, np.int64)


def token_ids(vocabulary: Vocabulary, text: str, name: str) -> Ids:
    """Ids of one text, without begin and end. Every letter of a protein is one, unknown ones too; white space is none.

    Args:
        vocabulary: of the model.
        text: a protein, a SMILES, or a text.
        name: what the text is called, for messages.

    Raises:
        UserError: when nothing of it is in the vocabulary.
    """
    if isinstance(vocabulary, Alphabet):  # training takes a run of unknown letters for one; here each has its place
        letters = "".join(text.split()).encode("ascii", "replace")
        ids: Ids = vocabulary.table[np.frombuffer(letters, np.uint8)]
    else:
        ids = vocabulary.encode(text.strip())
    if not len(ids):
        raise UserError(f"{name} is empty: leave it out, or give its sequence")
    if isinstance(vocabulary, TokenTable) and (ids == vocabulary.unk_id).all():
        raise UserError(f"{name} has no letter that the model knows ({text.strip()[:30]!r}): is that a sequence?")
    return ids


def room(model: LanguageModel) -> int:
    """Tokens that a text may have, without begin and end."""
    return model.config.max_position_embeddings - 2 * model.ends


def with_ends(model: LanguageModel, ids: Ids) -> Ids:
    """Put the tokens of begin and end around, where the model has them."""
    if not model.ends:
        return ids
    assert isinstance(model.vocabulary, TokenTable)
    return np.concatenate([[model.vocabulary.bos_id], ids, [model.vocabulary.eos_id]]).astype(ids.dtype)


class Limits(NamedTuple):
    """How much is computed together, at most; results do not depend on it."""

    tokens: int = 1 << 13
    sequences: int | None = None


USUAL = Limits()
# Rows of a matrix product, at least: libraries have other ways for few rows, which end in other bits.
ROWS = 64


def packs(lengths: Sequence[int], limits: Limits) -> Iterator[slice]:
    """Cut a list of sequences into stretches that are computed together; one that is too long is one by itself."""
    begin = total = 0
    for number, length in enumerate(lengths):
        if total and (total + length > limits.tokens or number - begin == limits.sequences):
            yield slice(begin, number)
            begin, total = number, 0
        total += length
    if total:
        yield slice(begin, len(lengths))


def packed(model: LanguageModel, sequences: Sequence[Ids]) -> PackedBatch:
    """Put sequences end to end, on the model's device, with filler where they are fewer tokens than ROWS."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    fill = np.full(max(ROWS - int(lengths.sum()), 0), model.vocabulary.pad_id)
    ids = np.concatenate([_NONE, *sequences, fill])
    longest = max(model.config.max_position_embeddings, int(lengths.max(initial=0)))
    stream = Stream(ids, lengths, np.zeros(len(lengths), np.uint64), longest)
    return assemble(Parts(stream, _NONE, _NONE)).to(next(model.parameters()).device)
