# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv: a protein encoder-decoder with T5's span objective (after ProtT5; Elnaggar et al. 2021)."""

from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.proteins.spans import SpanDataset
from bionemo.formats.nemo_models import NemoModel
from bionemo.models import nemo_names
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.tokenizers import Alphabet


class ProtT5nv(EncoderDecoder):
    """An encoder-decoder that fills in masked spans of protein sequences, after ProtT5.

    As in v1, it has layer norms with biases, learned positions and GELU.
    """

    tokenizer = "prott5nv"
    default_config = "prott5nv_small"
    card_tag = "protein"
    nemo = NemoModel(
        nemo_class="bionemo.model.protein.prott5nv.prott5_model.ProtT5nvModel", vocab_size=30, sentinels=96,
        names=nemo_names.ENCODER_DECODER, prefix="enc_dec_model.",
        config={**nemo_names.ENCODER_DECODER_CONFIG, "tokenizer": {"library": "sentencepiece"}},
    )  # fmt: skip
    dataset = SpanDataset
    config: ProtT5nvConfig
    vocabulary: Alphabet
