# SPDX-License-Identifier: Apache-2.0
"""Text to ids: one vocabulary per family of models."""

from bionemo.config.schema import TokenizerConfig
from bionemo.errors import UserError
from bionemo.tokenizers.alphabet import Alphabet
from bionemo.tokenizers.esm import esm2nv
from bionemo.tokenizers.protein import SENTINELS, esm1nv, prott5nv
from bionemo.tokenizers.vocabulary import TokenTable, Vocabulary

__all__ = ["Alphabet", "TokenTable", "Vocabulary", "load_tokenizer"]

_KNOWN = {
    "esm1nv": lambda config: esm1nv(),
    "esm2nv": lambda config: esm2nv(),
    "prott5nv": lambda config: prott5nv(
        SENTINELS if config.num_sentinel_tokens is None else config.num_sentinel_tokens
    ),
}


def load_tokenizer(name: str, config: TokenizerConfig | None = None) -> Vocabulary:
    """Give the vocabulary of a model family.

    Args:
        name: of the family.
        config: `model.tokenizer`; None: nothing is asked for there.

    Raises:
        UserError: when no vocabulary has this name, or its files are missing.
    """
    if name not in _KNOWN:
        raise UserError(f"tokenizer '{name}' is not known: choose one of {', '.join(_KNOWN)}")
    return _KNOWN[name](config or TokenizerConfig(library="megatron"))
