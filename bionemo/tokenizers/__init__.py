# SPDX-License-Identifier: Apache-2.0
"""Letters to ids: one alphabet per family of models."""

from bionemo.errors import UserError
from bionemo.tokenizers.alphabet import Alphabet
from bionemo.tokenizers.esm import esm2nv
from bionemo.tokenizers.protein import esm1nv

__all__ = ["Alphabet", "load_tokenizer"]

_ALPHABETS = {"esm1nv": esm1nv, "esm2nv": esm2nv}


def load_tokenizer(name: str) -> Alphabet:
    """Give the alphabet of a model family.

    Raises:
        UserError: when no alphabet has this name.
    """
    if name not in _ALPHABETS:
        raise UserError(f"tokenizer '{name}' is not known: choose one of {', '.join(_ALPHABETS)}")
    return _ALPHABETS[name]()
