# SPDX-License-Identifier: Apache-2.0
"""SMILES that a trained model cannot use, in its input."""

from collections.abc import Sequence

from bionemo.data.molecules.content_checks import find_unusable
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import SmilesTokenizer


def find_invalid(model: LanguageModel, texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the SMILES that a model cannot use, see `find_unusable`; none if the model does not read SMILES."""
    return find_unusable(texts, model.vocabulary) if isinstance(model.vocabulary, SmilesTokenizer) else {}
