# SPDX-License-Identifier: Apache-2.0
"""A protein as a masked language model reads it: a residue, a letter, a token."""

from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.inference.batching import Ids, room, token_ids
from bionemo.inference.model import TrainedModel
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers import Alphabet


class Protein(NamedTuple):
    """A protein of n residues.

    Attributes:
        letters: of its residues.
        ids: [n] their tokens, without begin and end.
        alphabet: of the model.
    """

    letters: str
    ids: Ids
    alphabet: Alphabet


def read_protein(model: TrainedModel, sequence: str, name: str = "the sequence") -> Protein:
    """Tokenise a protein for a model that must be a masked language model.

    Args:
        model: of any kind.
        sequence: letters; white space does not count.
        name: what it is called in messages.

    Raises:
        UserError: for a model of another kind; for a sequence that is empty, none, or too long.
    """
    network = model.network
    if not isinstance(network, MaskedLanguageModel):
        raise UserError(
            f"{model.path} is of {type(network).__name__}, no masked language model: take one of ESM1nv, ESM1b or "
            "ESM2nv"
        )
    letters = "".join(sequence.split())
    ids, most = token_ids(network.vocabulary, letters, name), room(network)
    if len(ids) > most:
        raise UserError(
            f"{name} has {len(ids):,} residues, the model reads {most:,} at most: give the stretch of it that matters"
        )
    return Protein(letters, ids, network.vocabulary)
