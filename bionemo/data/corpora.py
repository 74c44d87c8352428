# SPDX-License-Identifier: Apache-2.0
"""The documents of a split: a stretch of an indexed data set."""

import re
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.data.files import SplitName
from bionemo.data.indexed import IndexedTokens
from bionemo.errors import UserError

_SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_LOOKED_AT = 64, 4096  # stretches spread over a split, and their tokens, whose ids are held against the vocabulary
_ENDS = 256  # documents whose last token is looked at


def split_documents(splits_string: str, documents: int) -> dict[SplitName, tuple[int, int]]:
    """Deal documents, in the order of the file, to training, validation and test as Megatron-Core does.

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


def refuse_foreign_ids(ids: NDArray[np.integer[Any]], vocab_size: int, name: str) -> None:
    """Look at every id.

    Args:
        ids: of any shape, not empty.
        vocab_size: what they must be below.
        name: of the data they are from.

    Raises:
        UserError: naming the largest.
    """
    largest = int(ids.view(f"u{ids.itemsize}").max())  # as it is unsigned, a negative one is the largest of all
    if largest >= vocab_size:
        told = int(ids.min()) if ids.min() < 0 else largest
        raise UserError(
            f"{name} has the id {told}, outside the vocabulary of {vocab_size:,} tokens: it was prepared with another "
            "one; give model.tokenizer the files that it was prepared with, or prepare it again"
        )
