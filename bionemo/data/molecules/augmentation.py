# SPDX-License-Identifier: Apache-2.0
"""Which of its many SMILES a molecule is read and written as, and how much of it is hidden."""

from dataclasses import dataclass
from typing import Literal

from bionemo.common.errors import UserError

Form = Literal["stored", "canonical", "random"]


@dataclass(frozen=True)
class Forms:
    """In which form SMILES are read and written.

    With all switches off, both sides have the SMILES as it stands. A decoder without a switch of its own writes the
    form that the encoder reads; of a reaction, where it writes another molecule, that one as it stands.

    Attributes:
        encoder_augment: the encoder reads a random form, another one in each epoch.
        canonicalize_encoder_input: the encoder reads RDKit's canonical form.
        decoder_independent_augment: the decoder writes a random form of its own.
        canonicalize_decoder_output: the decoder writes the canonical form.
        canonicalize_target_smile: what is decoded is compared with the canonical form.
        encoder_mask: hide spans of what the encoder reads.
        decoder_mask: hide spans of what the decoder reads and is to write.
        mask_prob: at how many of the tokens a span begins.
        span_lambda: mean length of spans, in tokens.
    """

    encoder_augment: bool
    canonicalize_encoder_input: bool
    decoder_independent_augment: bool
    canonicalize_decoder_output: bool
    canonicalize_target_smile: bool
    encoder_mask: bool
    decoder_mask: bool
    mask_prob: float
    span_lambda: float

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: naming keys of model.data.
        """
        for one, other in (("encoder_augment", "canonicalize_encoder_input"),
                           ("decoder_independent_augment", "canonicalize_decoder_output")):  # fmt: skip
            if getattr(self, one) and getattr(self, other):
                raise UserError(
                    f"model.data.{one} and model.data.{other} are both true, but a SMILES is either random or "
                    "canonical: set one of them to false"
                )
        if not 0 <= self.mask_prob <= 1:
            raise UserError(f"model.data.mask_prob={self.mask_prob}: it is a share, give a number from 0 to 1")
        if not 0 <= self.span_lambda <= 100:
            raise UserError(f"model.data.span_lambda={self.span_lambda}: it is a mean in tokens, give 0 to 100")

    @property
    def reads(self) -> Form:
        """Form that the encoder reads."""
        return _form(self.encoder_augment, self.canonicalize_encoder_input)

    @property
    def writes(self) -> Form:
        """Form that the decoder writes, if it has a switch of its own."""
        return _form(self.decoder_independent_augment, self.canonicalize_decoder_output)


def _form(random: bool, canonical: bool) -> Form:
    return "random" if random else "canonical" if canonical else "stored"
