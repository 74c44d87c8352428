# SPDX-License-Identifier: Apache-2.0
"""SMILES that RDKit cannot parse, in the input of a trained model."""

from collections.abc import Sequence

from bionemo.data.molecules.smiles import is_valid
from bionemo.inference.batching import max_tokens
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import SmilesTokenizer


def find_invalid(model: LanguageModel, texts: Sequence[str]) -> list[int]:
    """Return the positions of the SMILES that RDKit cannot parse; none if the model does not read SMILES.

    SMILES that are too long for the model are not parsed, because RDKit's recursion crashes at about 20,000 atoms.
    """
    vocabulary, limit = model.vocabulary, max_tokens(model)
    if not isinstance(vocabulary, SmilesTokenizer):
        return []
    stripped = (text.strip() for text in texts)
    return [
        number
        for number, text in enumerate(stripped)
        if text and (len(text) <= limit or len(vocabulary.encode(text)) <= limit) and not is_valid(text)
    ]
