# SPDX-License-Identifier: Apache-2.0
"""MegaMolBART: an encoder-decoder of SMILES (after Chemformer; Irwin et al. 2022)."""

from bionemo.config.schema import MegaMolBARTConfig
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import TokenTable


class MegaMolBART(EncoderDecoder):
    """Reads a molecule in one form, with spans masked, and writes it in another."""

    tokenizer = "megamolbart"

    def __init__(self, config: MegaMolBARTConfig, vocabulary: TokenTable) -> None:
        super().__init__(config, vocabulary)
