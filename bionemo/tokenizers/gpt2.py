# SPDX-License-Identifier: Apache-2.0
"""GPT-2's byte-level BPE (Radford et al. 2019) from the user's `vocab.json` and `merges.txt`.

Documents come from untrusted files, so the text of a special token is never parsed: `<|endoftext|>` inside a document
is thirteen plain characters, as `<mask>` is to the alphabets.
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
_BRACKETS = ("<", "["), (">", "]")  # around the names of tokens that no merge has to make


class GPT2Tokenizer(Vocabulary):
    """Text to ids and back.

    Attributes:
        eod_id: `<|endoftext|>`, which ends a document; 50256 in GPT-2.
        tokens: text of every token, in GPT-2's letters for bytes; the id is the position. Empty without files.
        pad_id: the end of a document, of which nothing is asked where it fills up.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """Take a vocabulary as it stands in `read_gpt2`'s files, which have checked it."""
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
        """The smallest type of ids that Megatron's files and ours have: uint16, or int32."""
        return id_dtype(self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, before any padding of the embedding table."""
        return self.eod_id + 1 if self._bpe is None else len(self.tokens)

    @property
    def identity(self) -> list[str]:
        """The number of tokens and a digest of the files, in the place of 50,257 tokens."""
        return self._identity

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Ids of one text, `dtype` [n], without an end of document.

        Raises:
            UserError: when there are no files.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        """Ids of each text; in as many threads as TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS allow."""
        found = self._named().encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in found]

    def decode(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Text of ids [n], special tokens included; bytes that are no UTF-8 come as U+FFFD.

        Raises:
            IndexError: for an id outside the vocabulary.
            UserError: when there are no files.
        """
        bpe, numbers = self._named(), [int(number) for number in ids]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            raise IndexError(f"ids from {min(numbers)} to {max(numbers)} in a vocabulary of {self.vocab_size}")
        return str(bpe.decode(numbers, skip_special_tokens=False))

    def _named(self) -> Tokenizer:
        if self._bpe is None:
            raise UserError(
                "this tokenizer knows ids, not texts: give model.tokenizer.vocab_file and model.tokenizer.merge_file, "
                "GPT-2's vocab.json and merges.txt"
            )
        return self._bpe


class _Unnamed(GPT2Tokenizer):
    """Ids only."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens, self._bpe = (), None
        self.eod_id = self.pad_id = vocab_size - 1
        self._identity = ["unnamed", str(vocab_size)]


def unnamed(vocab_size: int) -> GPT2Tokenizer:
    """Stand in for a vocabulary of which only the size matters, as for mock data; the last id ends a document."""
    return _Unnamed(vocab_size)


def id_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Type that holds all ids of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


@lru_cache(maxsize=4)
def read_gpt2(vocab_file: str | Path | None, merge_file: str | Path | None) -> GPT2Tokenizer:
    """Read and check the two files of a vocabulary.

    Raises:
        UserError: a file that is not given, cannot be read or is of another kind, and files that do not belong
            together.
    """
    files = {"vocab_file": vocab_file, "merge_file": merge_file}
    for key, other in (("vocab_file", "merge_file"), ("merge_file", "vocab_file")):
        if files[key] is None:
            stands = "" if files[other] is None else f", but only {other}={files[other]} is given"
            raise UserError(f"GPT-2's tokenizer needs {key}{stands}: give both vocab_file and merge_file")
    vocab, merge = Path(str(vocab_file)), Path(str(merge_file))
    tokens = _tokens(vocab, _text(vocab))
    merges = _merges(merge, _text(merge))
    _belong_together(vocab, merge, set(tokens), merges)
    return GPT2Tokenizer(tokens, [pair for _, pair in merges])


def _text(path: Path) -> str:
    try:
        require_regular(path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check vocab_file and merge_file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: give GPT-2's vocab.json and merges.txt") from error


def _tokens(path: Path, text: str) -> list[str]:
    """Tokens in the order of their ids."""

    def wrong(what: str) -> NoReturn:
        raise UserError(f"{path} is no GPT-2 vocabulary ({what}): give the vocab.json that came with merges.txt")

    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        wrong(f"not JSON: {error}")
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        wrong("not an object of tokens and their ids")
    tokens = sorted(ids, key=ids.__getitem__)
    if any("\ud800" <= letter <= "\udfff" for letter in "".join(tokens)):
        wrong("a token is not Unicode text")
    for number, token in enumerate(tokens):
        if ids[token] != number:
            wrong(f"no token has the id {number}" if ids[token] > number else f"two tokens have the id {ids[token]}")
    if END_OF_DOCUMENT not in ids:
        wrong(f"no token {END_OF_DOCUMENT}")
    if lost := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys()):
        wrong(f"{len(lost)} of the 256 bytes have no token, such as {lost[0]!r}")
    return tokens


def _merges(path: Path, text: str) -> list[tuple[int, tuple[str, str]]]:
    """Merges with the numbers of their lines, in the order of their ranks."""
    merges: list[tuple[int, tuple[str, str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2 or not all(parts):
            raise UserError(f"{path}:{number}: no merge, which is two tokens and a space: give GPT-2's merges.txt")
        merges.append((number, (parts[0], parts[1])))
    return merges


def _belong_together(vocab: Path, merge: Path, tokens: set[str], merges: list[tuple[int, tuple[str, str]]]) -> None:
    advice = "give the two files of one vocabulary"
    made = set(pre_tokenizers.ByteLevel.alphabet())
    for number, (left, right) in merges:
        for token in (left, right, left + right):
            if token not in tokens:
                raise UserError(f"{merge}:{number}: {token!r} is not a token of {vocab}: {advice}")
        made.add(left + right)
    opening, closing = _BRACKETS
    orphans = [token for token in tokens - made if not (token.startswith(opening) and token.endswith(closing))]
    if orphans:
        raise UserError(
            f"{merge} is cut off, or not of {vocab}: no merge makes {len(orphans):,} tokens, such as "
            f"{min(orphans)!r}: {advice}"
        )
