# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv: a protein encoder-decoder with T5's span objective (after ProtT5; Elnaggar et al. 2021)."""

from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.proteins.spans import SpanDataset
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import Alphabet


class ProtT5nv(EncoderDecoder):
    """An encoder-decoder trained on span corruption, with layer norms with biases, learned positions and GELU (v1)."""

    tokenizer = "prott5nv"
    default_config = "prott5nv_small"
    dataset = SpanDataset
    config: ProtT5nvConfig
    vocabulary: Alphabet
