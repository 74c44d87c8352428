# SPDX-License-Identifier: Apache-2.0
"""ESM-2, ESM-1b and ESM-1v in the Hugging Face format: EsmConfig and EsmForMaskedLM, with the vocabulary of esm2nv."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.tokenizers.alphabet import esm2nv

_VOCABULARY_FILE = "vocab.txt"
_FIRST_POSITION = esm2nv().pad_id + 1  # positions are numbered after the padding token's
_LAYER = {
    "input_layernorm": "attention.LayerNorm",
    "self_attention.linear_qkv": "attention.self.query attention.self.key attention.self.value",
    "self_attention.linear_proj": "attention.output.dense",
    "pre_mlp_layernorm": "LayerNorm",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
}
EMBEDDINGS = {
    "word_embeddings.weight": "esm.embeddings.word_embeddings.weight",
    **module_names({"encoder.final_layernorm": "esm.encoder.emb_layer_norm_after"}),
}
_EMBEDDING_NORM = module_names({"embedding_layernorm": "esm.embeddings.layer_norm"})
ESM1B_EMBEDDINGS = {
    **EMBEDDINGS,
    "position_embeddings.table.weight": "esm.embeddings.position_embeddings.weight",
    **_EMBEDDING_NORM,
}
_HEAD_AND_LAYERS = {
    **module_names({"lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.layer_norm"}),
    "lm_head.bias": "lm_head.bias",
    **module_names(_LAYER, "encoder.layers.{}.", "esm.encoder.layer.{}."),
}
REQUIRED = {  # other values give the weights another meaning; transformers ignore hidden_act
    "is_folding_model": False, "is_decoder": False, "add_cross_attention": False,
    "tie_word_embeddings": True,
}  # fmt: skip

POOLER = r"pooler\..*"  # of EsmModel, after the last layer


def _read_settings(title: str, settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = esm2nv()
    ids = {"vocab_size": vocabulary.vocab_size, "mask_token_id": vocabulary.mask_id, "pad_token_id": vocabulary.pad_id}
    for key, value in ids.items():
        if (found := settings.get(key)) != value:
            raise UserError(
                f"{key} is {str(found)[:50]!r}; in {title}'s vocabulary it is {value}, and other vocabularies are not "
                "supported"
            )
    length = max(get_size(settings, "max_position_embeddings") - _FIRST_POSITION, 1)
    return {"activation": "gelu", "max_position_embeddings": length}


def _write_settings(title: str, positions: str, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    if (activation := config.get("activation", "gelu")) != "gelu":
        raise UserError(f"its activation is {str(activation)[:50]!r}; that of {title} is gelu")
    vocabulary = esm2nv()
    if vocab_size != vocabulary.vocab_size:
        raise UserError(f"its vocabulary has {vocab_size} tokens; that of {title} has {vocabulary.vocab_size}")
    return {
        "pad_token_id": vocabulary.pad_id,
        "mask_token_id": vocabulary.mask_id,
        "max_position_embeddings": get_size(config, "max_position_embeddings") + _FIRST_POSITION,
        "position_embedding_type": positions,
    }


def _write_tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {f"{name}_token": f"<{name}>" for name in ("cls", "pad", "eos", "unk", "mask")}
    settings = {"tokenizer_class": "EsmTokenizer", "model_max_length": config["max_position_embeddings"], **tokens}
    vocabulary = "\n".join(esm2nv().tokens)
    return {_VOCABULARY_FILE: vocabulary, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    file, expected = directory / _VOCABULARY_FILE, "\n".join(esm2nv().tokens)
    if file.is_file():
        with file.open("rb") as opened:
            found = opened.read(2 * len(expected))  # a longer file is another vocabulary
        if found.split() != expected.encode().split():
            raise UserError(f"its {_VOCABULARY_FILE} is not the vocabulary of ESM-2")
    return {}


def esm_architecture(title: str, positions: str, names: Mapping[str, str], **others: Any) -> Architecture:
    """Return an architecture of the class EsmForMaskedLM."""
    learned = positions == "absolute"
    return Architecture(
        title=title, model_type="esm", class_name="EsmForMaskedLM", prefix="esm.", position_type=positions,
        names=WeightNames(
            {**names, **_HEAD_AND_LAYERS},
            only_if=dict.fromkeys(_EMBEDDING_NORM, ("embedding_layer_norm", True)),
            copies={
                "lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            pads_vocabulary=False, qkv_by_head=False, extra_positions=_FIRST_POSITION if learned else 0,
        ),
        sizes={
            "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
            "num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size",
        },
        numbers={  # with the defaults of EsmConfig
            "hidden_dropout": ("hidden_dropout_prob", 0.1), "layernorm_epsilon": ("layer_norm_eps", 1e-12),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1), "init_method_std": ("initializer_range", 0.02),
        },
        read_settings=partial(_read_settings, title), write_settings=partial(_write_settings, title, positions),
        write_tokenizer=_write_tokenizer, read_tokenizer=_read_tokenizer,
        contact_head="esm.contact_head.regression", **others,
    )  # fmt: skip
