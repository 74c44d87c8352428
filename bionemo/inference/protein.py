# SPDX-License-Identifier: Apache-2.0
"""Proteins tokenized for a masked language model, one token per residue."""

from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.inference.batching import Ids, max_tokens, tokenize, too_long_error
from bionemo.inference.outputs import InferenceModel
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers import Alphabet
from bionemo.tokenizers.residues import trim


class Protein(NamedTuple):
    """A protein of n residues: letters in upper case, token ids [n] without begin and end, the model's vocabulary."""

    letters: str
    ids: Ids
    alphabet: Alphabet


def masked_network(model: InferenceModel) -> MaskedLanguageModel:
    """Return the network of a masked language model.

    Raises:
        UserError: if the model is of another kind.
    """
    if not isinstance(model.network, MaskedLanguageModel):
        kind = type(model.network).__name__
        raise UserError(f"{model.path} is a {kind}, not a masked language model: use ESM1nv, ESM1b, ESM2nv or ESMC")
    return model.network


def tokenize_protein(
    model: InferenceModel, sequence: str, name: str = "the sequence", any_length: bool = False
) -> Protein:
    """Tokenize a protein, without white space and `*` at its end; `name` is its name in error messages.

    Raises:
        UserError: if the model is not a masked language model, or the sequence is empty, invalid or, unless
            `any_length`, too long.
    """
    network = masked_network(model)
    ids, max_length = tokenize(network.vocabulary, sequence, name), max_tokens(network)
    letters = trim("".join(sequence.split()).encode()).decode().upper()
    if len(ids) > max_length and not any_length:
        size = len(ids) + 2  # with begin and end tokens
        remedy = (
            f"cut out a domain, or set max_length={size}, with begin and end tokens (bionemo analysis and evaluate: "
            f"--max-length {size}; evaluate leaves it out with --keep-going)"
        )
        raise too_long_error(name, len(ids), max_length, remedy, "residues")
    return Protein(letters, ids, network.vocabulary)
