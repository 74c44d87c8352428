# SPDX-License-Identifier: Apache-2.0
"""GPT-2's byte-level BPE (Radford et al. 2019) from the user's `vocab.json` and `merges.txt`.

The text of a special token is never parsed, because documents come from untrusted files: `<|endoftext|>` in a document
is thirteen plain characters.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.tokenizers.vocabulary import Vocabulary

END_OF_DOCUMENT = "<|endoftext|>"
_SPECIAL = re.compile(r"[<\[].*[>\]]")  # special tokens, which no merge creates


class GPT2Tokenizer(Vocabulary):
    """Byte-level BPE.

    Attributes:
        eod_id: `<|endoftext|>`, which ends a document; 50256 in GPT-2.
        tokens: text of every token, in GPT-2's letters for bytes; the id is the position. Empty without files.
        pad_id: equals eod_id; the loss ignores padding.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """Build the tokenizer from tokens and merges that `read_gpt2` has checked."""
        self.tokens = tuple(tokens)
        self.eod_id = self.pad_id = self.tokens.index(END_OF_DOCUMENT)
        digest = hashlib.blake2b(json.dumps([self.tokens, merges]).encode(), digest_size=16).hexdigest()
        self._identity = ["gpt2", str(len(tokens)), digest]
        self._bpe: Tokenizer | None = Tokenizer(
            models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=list(merges))
        )
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """Type of ids, as in Megatron's indexed files: uint16 or int32."""
        return id_dtype(self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding of the embedding table."""
        return self.eod_id + 1 if self._bpe is None else len(self.tokens)

    @property
    def identity(self) -> list[str]:
        """The number of tokens and a digest of the files, instead of 50,257 tokens."""
        return self._identity

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the ids of one text, `dtype` [n], without an end of document.

        Raises:
            UserError: if there are no vocabulary files.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        """Return the ids of each text; TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS control the threads."""
        encodings = self._require_bpe().encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of ids [n], including special tokens; invalid UTF-8 becomes U+FFFD.

        Raises:
            IndexError: if an id is outside the vocabulary.
            UserError: if there are no vocabulary files.
        """
        bpe, numbers = self._require_bpe(), [int(number) for number in ids]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            raise IndexError(f"ids from {min(numbers)} to {max(numbers)} exceed a vocabulary of {self.vocab_size}")
        return str(bpe.decode(numbers, skip_special_tokens=False))

    def _require_bpe(self) -> Tokenizer:
        if self._bpe is None:
            raise UserError(
                "this tokenizer has no vocabulary files: set model.tokenizer.vocab_file and "
                "model.tokenizer.merge_file to GPT-2's vocab.json and merges.txt"
            )
        return self._bpe


class _PlaceholderTokenizer(GPT2Tokenizer):
    """A tokenizer of which only the vocabulary size is known."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens, self._bpe = (), None
        self.eod_id = self.pad_id = vocab_size - 1
        self._identity = ["unnamed", str(vocab_size)]


def placeholder_tokenizer(vocab_size: int) -> GPT2Tokenizer:
    """Return a tokenizer without texts, for mock data; the last id is the end of a document."""
    return _PlaceholderTokenizer(vocab_size)


def id_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Return the type of the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


@lru_cache(maxsize=4)
def read_gpt2(vocab_file: str | Path | None, merge_file: str | Path | None) -> GPT2Tokenizer:
    """Read and check GPT-2's vocab.json and merges.txt.

    Raises:
        UserError: if a file is missing, unreadable or invalid, or if the files belong to different vocabularies.
    """
    files = {"vocab_file": vocab_file, "merge_file": merge_file}
    for key, other in (("vocab_file", "merge_file"), ("merge_file", "vocab_file")):
        if files[key] is None:
            given = "" if files[other] is None else f", but only {other}={files[other]} is given"
            raise UserError(f"GPT-2's tokenizer needs {key}{given}: give both vocab_file and merge_file")
    vocab, merge = Path(str(vocab_file)), Path(str(merge_file))
    try:
        require_regular(vocab)
        require_regular(merge)
        ids, merges = models.BPE.read_file(str(vocab), str(merge))
        return GPT2Tokenizer(_check_tokens(ids, merges), merges)
    except Exception as error:  # the library raises this class
        problem = " ".join(str(error).split())[:200]
        raise UserError(
            f"{vocab} and {merge} are not the files of one GPT-2 vocabulary ({problem}): give its vocab.json and "
            "merges.txt"
        ) from error


def _check_tokens(ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> list[str]:
    """Return the tokens in the order of their ids.

    Raises:
        ValueError: if ids are missing, or no merge creates a token, as after a truncation.
    """
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("the ids of the tokens are not 0, 1, 2 ...")
    letters = pre_tokenizers.ByteLevel.alphabet()
    if missing := sorted({END_OF_DOCUMENT, *letters} - ids.keys()):
        raise ValueError(f"no token {missing[0]!r}")
    created = {*letters, *map("".join, merges)}
    lost = [token for token in tokens if token not in created and not _SPECIAL.fullmatch(token)]
    if lost:
        raise ValueError(f"no merge creates {len(lost):,} tokens, such as {min(lost)!r}")
    return tokens
