# SPDX-License-Identifier: Apache-2.0
"""Splits of Megatron's indexed data sets: each split is a range of the documents."""

import re
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.files import SPLITS, SplitName
from bionemo.data.text.indexed import IndexedTokens

_CHECKED_RANGES, _CHECKED_TOKENS = 64, 4096  # evenly spaced ranges, and their length, checked when a split is opened


def split_documents(splits_string: str, documents: int) -> dict[SplitName, tuple[int, int]]:
    """Divide documents, in file order, into training, validation and test as Megatron-Core does for GPT.

    `splits_string` contains shares with any sum, such as "980,10,10"; missing ones are 0. Returns the first document
    of each split, and the first after it.

    Raises:
        UserError: if the shares are invalid.
    """
    try:
        shares = [float(share) for share in re.split("[,/]", splits_string)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLITS) or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise UserError(
            f"model.data.splits_string={splits_string!r}: set it to the shares of training, validation and test, such "
            'as "980,10,10"'
        )
    fractions = (np.array([*shares, 0.0, 0.0][: len(SPLITS)]) / np.sum(shares)).tolist()
    bounds = [round(bound * documents) for bound in accumulate(fractions, initial=0.0)]
    return dict(zip(SPLITS, pairwise(bounds), strict=True))


class CorpusSplit:
    """A `TokenStream` of a range of documents, as a ring: the first token follows the last one."""

    def __init__(self, corpus: IndexedTokens, first: int, last: int) -> None:
        """Select documents `first` to `last` - 1."""
        self.name, self._corpus = corpus.prefix, corpus
        self._begin = corpus.document_start(first)
        self.size = corpus.document_start(last) - self._begin
        self.fingerprint: dict[str, Any] = {**corpus.fingerprint, "split": [first, last]}

    @classmethod
    def open(cls, prefix: str, splits_string: str, name: SplitName, vocab_size: int) -> "CorpusSplit":
        """Open a split of an indexed data set and check a sample of its ids.

        Raises:
            UserError: if a file cannot be read, the split is empty, or an id is outside the vocabulary.
        """
        corpus = IndexedTokens(prefix)
        split = cls(corpus, *split_documents(splits_string, corpus.documents)[name])
        if not split.size:
            raise UserError(
                f"model.data.splits_string={splits_string} leaves {name} none of the {corpus.documents:,} documents "
                f"of {prefix}: increase its share, or add text"
            )
        starts = np.linspace(0, split.size - 1, _CHECKED_RANGES).astype(np.int64)
        check_token_ids(split.read(starts, min(_CHECKED_TOKENS, split.size)), vocab_size, prefix)
        return split

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Return tokens [k, count] from each start [k]; `count` is at most `size`."""
        self._corpus.check()
        tokens = np.empty((len(starts), count), self._corpus.tokens.dtype)
        begins = self._begin + starts % self.size
        end = self._begin + self.size
        for row, begin in zip(tokens, begins.tolist(), strict=True):
            part = self._corpus.tokens[begin : min(begin + count, end)]
            row[: len(part)] = part
            if rest := count - len(part):
                row[len(part) :] = self._corpus.tokens[self._begin : self._begin + rest]
        return tokens


def check_token_ids(ids: NDArray[np.integer[Any]], vocab_size: int, name: str) -> None:
    """Raise a UserError if an id, of any shape but not empty, is not in the vocabulary.

    It names the data and the largest (or smallest) id.
    """
    largest = int(ids.view(f"u{ids.itemsize}").max())  # as unsigned numbers, negative ids are the largest
    if largest >= vocab_size:
        token = int(ids.min()) if ids.min() < 0 else largest
        raise UserError(
            f"{name} has the id {token}, outside the vocabulary of {vocab_size:,} tokens: set model.tokenizer to the "
            "files with which the data was prepared, or prepare it again"
        )
