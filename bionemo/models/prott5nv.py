# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv: a protein encoder-decoder with T5's span objective (after ProtT5; Elnaggar et al. 2021)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.proteins.spans import SpanDataset
from bionemo.formats.detect import CONFIG
from bionemo.formats.huggingface.files import read_json
from bionemo.formats.nemo_models import NemoModel
from bionemo.models import nemo_names
from bionemo.models.encoder_decoder import EncoderDecoder
from bionemo.models.hugging_face_blenderbot import blenderbot_architecture
from bionemo.tokenizers import Alphabet
from bionemo.tokenizers.alphabet import SENTINEL_COUNT, prott5nv

_LARGEST = 256  # tokens; ids fit one byte


def _vocabulary(config: Mapping[str, Any]) -> Alphabet:
    count = (config.get("tokenizer") or {}).get("num_sentinel_tokens")
    return prott5nv(SENTINEL_COUNT if count is None else count)


def _is_prott5nv(settings: Mapping[str, Any]) -> bool:
    size = settings.get("vocab_size")
    return type(size) is int and prott5nv(0).vocab_size <= size < _LARGEST


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    size = read_json(directory / CONFIG)["vocab_size"]
    return {"tokenizer": {"num_sentinel_tokens": size - prott5nv(0).vocab_size}}


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
    hugging_face = blenderbot_architecture(
        "ProtT5nv", _is_prott5nv, _vocabulary, letters=".", read_tokenizer=_read_tokenizer
    )
    dataset = SpanDataset
    config: ProtT5nvConfig
    vocabulary: Alphabet
