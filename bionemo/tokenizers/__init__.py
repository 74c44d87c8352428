# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: one vocabulary per model family."""

from collections.abc import Callable
from typing import Protocol

from bionemo.common.errors import UserError
from bionemo.tokenizers.alphabet import SENTINEL_COUNT, Alphabet, esm1nv, esm2nv, esmc, prott5nv
from bionemo.tokenizers.smiles import SmilesTokenizer, megamolbart
from bionemo.tokenizers.vocabulary import TokenTable, Vocabulary

__all__ = ["Alphabet", "SmilesTokenizer", "TokenTable", "TokenizerFactory", "Vocabulary", "load_tokenizer"]

_GPT2_VOCABULARY_SIZE = 50257


class TokenizerSettings(Protocol):
    """The fields of `model.tokenizer` that a vocabulary depends on."""

    vocab_file: str | None
    merge_file: str | None
    num_sentinel_tokens: int | None


def _prott5nv(config: TokenizerSettings | None) -> Vocabulary:
    count = config.num_sentinel_tokens if config else None
    return prott5nv(SENTINEL_COUNT if count is None else count)


def _gpt2(config: TokenizerSettings | None) -> Vocabulary:
    """Read the user's vocabulary files; without files, return a tokenizer without texts, for mock text."""
    from bionemo.tokenizers.gpt2 import placeholder_tokenizer, read_gpt2  # other models do not need `tokenizers`

    if config is None or (config.vocab_file is None and config.merge_file is None):
        return placeholder_tokenizer(_GPT2_VOCABULARY_SIZE)
    return read_gpt2(config.vocab_file, config.merge_file)


TokenizerFactory = Callable[[TokenizerSettings | None], Vocabulary]
_TOKENIZERS: dict[str, TokenizerFactory] = {
    "esm1nv": lambda config: esm1nv(),
    "esm2nv": lambda config: esm2nv(),
    "esmc": lambda config: esmc(),
    "prott5nv": _prott5nv,
    "megamolbart": lambda config: megamolbart(),
    "gpt2": _gpt2,
}


def load_tokenizer(tokenizer: str | TokenizerFactory, config: TokenizerSettings | None = None) -> Vocabulary:
    """Return the vocabulary of a model family.

    Args:
        tokenizer: name of a tokenizer, such as "esm2nv", or a function that returns the vocabulary for `config`.
        config: `model.tokenizer`. None selects the defaults.

    Raises:
        UserError: if no tokenizer has this name, or its files are missing.
    """
    if callable(tokenizer):
        return tokenizer(config)
    if tokenizer not in _TOKENIZERS:
        raise UserError(f"unknown tokenizer '{tokenizer}': choose one of {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[tokenizer](config)
