# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv: an encoder-decoder of proteins that fills in hidden residues (after ProtT5; Elnaggar et al. 2021)."""

from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.proteins.spans import SpanSamples
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import Alphabet


class ProtT5nv(EncoderDecoder):
    """T5's objective on the predecessor's layers: layer norms with biases, learned positions, GELU."""

    tokenizer = "prott5nv"
    base = "prott5nv_small"
    samples = SpanSamples

    def __init__(self, config: ProtT5nvConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)
