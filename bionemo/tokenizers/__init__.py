# SPDX-License-Identifier: Apache-2.0
"""Text to ids: one vocabulary per family of models."""

from bionemo.config.schema import TokenizerConfig
from bionemo.errors import UserError
from bionemo.tokenizers.alphabet import Alphabet
from bionemo.tokenizers.esm import esm2nv
from bionemo.tokenizers.protein import SENTINELS, esm1nv, prott5nv
from bionemo.tokenizers.smiles import SmilesTokenizer, megamolbart
from bionemo.tokenizers.vocabulary import TokenTable, Vocabulary

__all__ = ["Alphabet", "SmilesTokenizer", "TokenTable", "Vocabulary", "load_tokenizer"]

_WORDS_OF_GPT2 = 50257


def _gpt2(config: TokenizerConfig) -> Vocabulary:
    """The user's; without files, numbers in its place, which are enough for made-up text."""
    from bionemo.tokenizers.gpt2 import read_gpt2, unnamed  # other models do not pay for it

    if config.vocab_file is None and config.merge_file is None:
        return unnamed(_WORDS_OF_GPT2)
    return read_gpt2(config.vocab_file, config.merge_file)


_KNOWN = {
    "esm1nv": lambda config: esm1nv(),
    "esm2nv": lambda config: esm2nv(),
    "prott5nv": lambda config: prott5nv(
        SENTINELS if config.num_sentinel_tokens is None else config.num_sentinel_tokens
    ),
    "megamolbart": lambda config: megamolbart(),
    "gpt2": _gpt2,
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
