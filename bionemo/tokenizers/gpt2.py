# SPDX-License-Identifier: Apache-2.0
"""GPT-2's byte-level BPE (Radford et al. 2019) from the user's `vocab.json` and `merges.txt`.

The text of a special token is never parsed, because documents come from untrusted files: `<|endoftext|>` in a document
is thirteen plain characters.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.tokenizers.vocabulary import Vocabulary

END_OF_DOCUMENT = "<|endoftext|>"
_BRACKETS = ("<", "["), (">", "]")  # around special tokens, which no merge creates


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
    tokens = _parse_tokens(vocab, _read_text(vocab))
    merges = _parse_merges(merge, _read_text(merge))
    _check_same_vocabulary(vocab, merge, set(tokens), merges)
    return GPT2Tokenizer(tokens, [pair for _, pair in merges])


def _read_text(path: Path) -> str:
    try:
        require_regular(path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check vocab_file and merge_file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: give GPT-2's vocab.json and merges.txt") from error


def _parse_tokens(path: Path, text: str) -> list[str]:
    """Return the tokens in the order of their ids."""

    def fail(reason: str) -> NoReturn:
        raise UserError(f"{path} is not a GPT-2 vocabulary ({reason}): give the vocab.json that belongs to merges.txt")

    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(f"not JSON: {error}")
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        fail("not an object of tokens and their ids")
    tokens = sorted(ids, key=ids.__getitem__)
    if any("\ud800" <= letter <= "\udfff" for letter in "".join(tokens)):
        fail("a token is not Unicode text")
    for number, token in enumerate(tokens):
        if ids[token] != number:
            fail(f"no token has the id {number}" if ids[token] > number else f"two tokens have the id {ids[token]}")
    if END_OF_DOCUMENT not in ids:
        fail(f"no token {END_OF_DOCUMENT}")
    if lost := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys()):
        fail(f"{len(lost)} of the 256 bytes have no token, such as {lost[0]!r}")
    return tokens


def _parse_merges(path: Path, text: str) -> list[tuple[int, tuple[str, str]]]:
    """Return the line number and the two tokens of each merge, in the order of their ranks."""
    merges: list[tuple[int, tuple[str, str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2 or not all(parts):
            raise UserError(f"{path}:{number}: expected two tokens separated by a space: give GPT-2's merges.txt")
        merges.append((number, (parts[0], parts[1])))
    return merges


def _check_same_vocabulary(
    vocab: Path, merge: Path, tokens: set[str], merges: list[tuple[int, tuple[str, str]]]
) -> None:
    advice = "give the two files of one vocabulary"
    created = set(pre_tokenizers.ByteLevel.alphabet())
    for number, (left, right) in merges:
        for token in (left, right, left + right):
            if token not in tokens:
                raise UserError(f"{merge}:{number}: {token!r} is not a token of {vocab}: {advice}")
        created.add(left + right)
    opening, closing = _BRACKETS
    unreachable = [token for token in tokens - created if not (token.startswith(opening) and token.endswith(closing))]
    if unreachable:
        raise UserError(
            f"{merge} is incomplete or does not belong to {vocab}: no merge creates {len(unreachable):,} tokens, such "
            f"as {min(unreachable)!r}: {advice}"
        )
