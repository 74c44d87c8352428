# SPDX-License-Identifier: Apache-2.0
"""Options of SMILES augmentation and masking."""

from dataclasses import dataclass
from typing import Literal

from bionemo.common.errors import UserError

SmilesForm = Literal["stored", "canonical", "random"]


@dataclass(frozen=True)
class Augmentation:
    """SMILES forms and masks of encoder and decoder, named as in `model.data`.

    Without any option both sides get the stored SMILES. A decoder without an option of its own gets the SMILES of the
    encoder; for reactions, where the molecules differ, it gets the stored SMILES.
    """

    encoder_augment: bool = False  # the encoder reads a random SMILES that changes with the epoch
    canonicalize_encoder_input: bool = False  # the encoder reads RDKit's canonical SMILES
    # the decoder's target is a random SMILES, drawn independently of the encoder's
    decoder_independent_augment: bool = False
    canonicalize_decoder_output: bool = False  # the decoder's target is the canonical SMILES
    encoder_mask: bool = False  # mask spans of the encoder input
    decoder_mask: bool = False  # mask spans of the decoder input and targets
    mask_prob: float = 0.1  # probability that a span begins at a token
    span_lambda: float = 3.0  # mean length of spans in tokens

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: if options contradict each other.
        """
        for random, canonical in (("encoder_augment", "canonicalize_encoder_input"),
                                  ("decoder_independent_augment", "canonicalize_decoder_output")):  # fmt: skip
            if getattr(self, random) and getattr(self, canonical):
                raise UserError(
                    f"model.data.{random} and model.data.{canonical} are both true, but a SMILES is either random or "
                    "canonical: set one of them to false"
                )

    @property
    def encoder_form(self) -> SmilesForm:
        """SMILES form of the encoder input."""
        return _form(self.encoder_augment, self.canonicalize_encoder_input)

    @property
    def decoder_form(self) -> SmilesForm:
        """SMILES form of the decoder's targets; "stored" if the decoder has no option of its own."""
        return _form(self.decoder_independent_augment, self.canonicalize_decoder_output)


def _form(random: bool, canonical: bool) -> SmilesForm:
    return "random" if random else "canonical" if canonical else "stored"
