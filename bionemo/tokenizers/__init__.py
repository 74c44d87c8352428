# SPDX-License-Identifier: Apache-2.0
"""Letters to ids: one vocabulary per family of models."""

from collections.abc import Callable
from typing import Literal, overload

from bionemo.errors import UserError
from bionemo.tokenizers.alphabet import Alphabet
from bionemo.tokenizers.esm import esm2nv
from bionemo.tokenizers.protein import esm1nv
from bionemo.tokenizers.smiles import SmilesTokenizer, megamolbart
from bionemo.tokenizers.vocabulary import Vocabulary

__all__ = ["Alphabet", "SmilesTokenizer", "Vocabulary", "load_tokenizer"]

_VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "esm1nv": esm1nv, "esm2nv": esm2nv, "megamolbart": megamolbart
}  # fmt: skip


@overload
def load_tokenizer(name: Literal["megamolbart"]) -> SmilesTokenizer: ...  # type: ignore[overload-overlap]
@overload
def load_tokenizer(name: str) -> Alphabet: ...
def load_tokenizer(name: str) -> Vocabulary:
    """Give the vocabulary of a model family.

    Raises:
        UserError: when no vocabulary has this name.
    """
    if name not in _VOCABULARIES:
        raise UserError(f"tokenizer '{name}' is not known: choose one of {', '.join(_VOCABULARIES)}")
    return _VOCABULARIES[name]()
