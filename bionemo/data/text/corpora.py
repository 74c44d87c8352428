# SPDX-License-Identifier: Apache-2.0
"""Samples from indexed data sets: each split is a stretch of the documents of each of them."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.files import SplitName, parse_prefixes
from bionemo.data.text.documents import DocumentSamples, Switches, refuse_foreign_ids
from bionemo.data.text.indexed import IndexedTokens

Kind = TypeVar("Kind", bound=DocumentSamples)
_SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_LOOKED_AT = 64, 4096  # stretches spread over a split, and their tokens, whose ids are held against the vocabulary
_ENDS = 256  # documents whose last token is looked at


def split_documents(splits_string: str, documents: int) -> dict[SplitName, tuple[int, int]]:
    """Deal documents, in the order of the file, to training, validation and test as Megatron-Core does.

    Megatron counts sequences, of which its data sets for GPT have one in a document.

    Args:
        splits_string: their shares, of any sum, as in "980,10,10"; those that are left out are 0.
        documents: number of documents.

    Returns:
        First document of each split, and the first behind it.

    Raises:
        UserError: when the shares are none.
    """
    try:
        shares = [float(share) for share in re.split("[,/]", splits_string)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(_SPLITS) or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise UserError(
            f"model.data.splits_string={splits_string!r}: give the shares of training, validation and test, as in "
            '"980,10,10"'
        )
    parts = (np.array([*shares, 0.0, 0.0][: len(_SPLITS)]) / np.sum(shares)).tolist()
    bounds = [round(bound * documents) for bound in accumulate(parts, initial=0.0)]
    return dict(zip(_SPLITS, pairwise(bounds), strict=True))


class CorpusSplit:
    """The tokens of successive documents, as a circle: behind the last one comes the first.

    Attributes:
        name: what the user calls it.
        size: number of tokens.
        identity: what tells it from others.
    """

    def __init__(self, corpus: IndexedTokens, first: int, last: int) -> None:
        """Take the documents from `first` on and before `last`."""
        self.name, self._corpus, self._documents = corpus.prefix, corpus, (first, last)
        self._begin = corpus.document_begins(first)
        self.size = corpus.document_begins(last) - self._begin
        self.identity: dict[str, Any] = {**corpus.identity, "split": [first, last]}

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Tokens [k, count] from each of the starts [k] on; a stretch is at most the whole circle."""
        self._corpus.check()
        found = np.empty((len(starts), count), self._corpus.tokens.dtype)
        begins = self._begin + starts % self.size
        end = self._begin + self.size
        for row, begin in zip(found, begins.tolist(), strict=True):
            here = self._corpus.tokens[begin : min(begin + count, end)]
            row[: len(here)] = here
            if rest := count - len(here):
                row[len(here) :] = self._corpus.tokens[self._begin : self._begin + rest]
        return found

    def ends_with(self, token: int) -> bool:
        """Whether any of some documents, spread over the split, ends with a token."""
        first, last = self._documents
        chosen = np.unique(np.linspace(first, last - 1, min(_ENDS, last - first)).astype(np.int64))
        ends = [self._corpus.document_begins(document + 1) for document in chosen.tolist()]
        return any(end > self._begin and self._corpus.tokens[end - 1] == token for end in ends)


def open_corpus(prefix: str, splits_string: str, split: SplitName, vocab_size: int) -> CorpusSplit:
    """Open one split of an indexed data set, and look whether its ids are of the vocabulary.

    Raises:
        UserError: files that cannot be read, a split without tokens, or ids outside the vocabulary.
    """
    corpus = IndexedTokens(prefix)
    found = CorpusSplit(corpus, *split_documents(splits_string, corpus.documents)[split])
    if not found.size:
        raise UserError(
            f"model.data.splits_string={splits_string} leaves {split} nothing of the {corpus.documents:,} documents "
            f"of {prefix}: give it a larger share, or more text"
        )
    stretches, tokens = _LOOKED_AT
    starts = np.linspace(0, found.size - 1, stretches).astype(np.int64)
    refuse_foreign_ids(found.read(starts, min(tokens, found.size)), vocab_size, prefix)
    return found


def open_documents(
    data_prefix: str | Sequence[str | float],
    splits_string: str,
    split: SplitName,
    *,
    seq_length: int,
    vocab_size: int,
    eod_id: int,
    seed: int,
    switches: Switches,
    kind: type[Kind] = DocumentSamples,  # type: ignore[assignment]
) -> Kind:
    """Open a split of indexed data sets.

    Args:
        data_prefix: see `parse_prefixes`.
        splits_string: see `split_documents`; it divides each data set.
        split: which one; only the cut of training moves.
        seq_length: see `DocumentSamples`, as are the rest.
        vocab_size: size of the vocabulary, without padding.
        eod_id: id of the end of a document.
        seed: of what is drawn.
        switches: what the end of a document means.
        kind: what to open them as.

    Raises:
        UserError: files that cannot be read, ids outside the vocabulary, too few tokens, or a weight too small.
    """
    prefixes, weights = parse_prefixes(data_prefix)
    streams = tuple(open_corpus(prefix, splits_string, split, vocab_size) for prefix in prefixes)
    notices = tuple(
        f"{split} data: no document of {stream.name} ends with the id {eod_id}: where one ends cannot be told"
        for stream in streams
        if not stream.ends_with(eod_id)
    )
    return kind(
        streams,
        seq_length=seq_length,
        vocab_size=vocab_size,
        eod_id=eod_id,
        seed=seed,
        switches=switches,
        weights=weights,
        shift=split == "train",
        notices=notices,
    )
