# SPDX-License-Identifier: Apache-2.0
"""ESM-2, after transformers' EsmConfig and EsmForMaskedLM; there and in the published weights the words are ours."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.errors import UserError
from bionemo.interop.fit import MOST_LAYERS, size_of
from bionemo.interop.huggingface.names import Architecture, Modules
from bionemo.tokenizers.esm import esm2nv

_OURS, _CLASS, _TYPE = "bionemo.models.esm2nv.ESM2nv", "EsmForMaskedLM", "esm"
_VOCABULARY, _MULTIPLE = "vocab.txt", "make_vocab_size_divisible_by"
_BEFORE = 2  # their positions begin behind that of padding; none of them has a weight
_ENDS: Modules = {
    "word_embeddings": ("embeddings.word_embeddings", "VH", ""),
    "encoder.final_layernorm": ("encoder.emb_layer_norm_after", "H", "H"),
}
_HEAD: Modules = {
    "lm_head.dense": ("lm_head.dense", "HH", "H"),
    "lm_head.layer_norm": ("lm_head.layer_norm", "H", "H"),
    "lm_head": ("lm_head", "", "V"),
}
_LAYER: Modules = {
    "input_layernorm": ("attention.LayerNorm", "H", "H"),
    "self_attention.linear_qkv": ("attention.self.query attention.self.key attention.self.value", "QH", "Q"),
    "self_attention.linear_proj": ("attention.output.dense", "HH", "H"),
    "pre_mlp_layernorm": ("LayerNorm", "H", "H"),
    "mlp.linear_fc1": ("intermediate.dense", "FH", "F"),
    "mlp.linear_fc2": ("output.dense", "HF", "H"),
}
# The only values under which the weights mean what they mean here; they are also what is meant when nothing is said.
_ONLY = {
    "hidden_act": "gelu", "rope_theta": 10000.0, "emb_layer_norm_before": False, "is_folding_model": False,
    "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
}  # fmt: skip
_SIZES = {"hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads"}
_SHARES = {  # ours -> theirs, and EsmConfig's default
    "hidden_dropout": ("hidden_dropout_prob", 0.1), "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "layernorm_epsilon": ("layer_norm_eps", 1e-12), "init_method_std": ("initializer_range", 0.02),
}  # fmt: skip


def _to_config(settings: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    for key, value in _ONLY.items():
        said = settings.get(key, value)
        if said != value and not (said is None and value is False):
            raise UserError(f"its config.json says {key}: {str(said)[:50]!r}, of which {value} alone is read")
    if (kind := settings.get("position_embedding_type", "absolute")) != "rotary":
        raise UserError(f"its position_embedding_type is {str(kind)[:50]!r}: ESM-2's, which is read, is 'rotary'")
    if type(dropout := settings.get("token_dropout", False)) is not bool:
        raise UserError(f"its token_dropout is {str(dropout)[:50]!r}, neither true nor false")
    vocabulary = esm2nv()
    ids = {"vocab_size": vocabulary.vocab_size, "mask_token_id": vocabulary.mask_id, "pad_token_id": vocabulary.pad_id}
    for key, value in ids.items():
        if (said := settings.get(key)) != value:
            raise UserError(f"its {key} is {str(said)[:50]!r}, of ESM-2's vocabulary {value}: it reads other letters")
    config: dict[str, Any] = {"_target_": _OURS, "position_embedding_type": "rope", "kv_channels": None}
    config |= {ours: size_of(settings, theirs) for ours, theirs in _SIZES.items()}
    if config["hidden_size"] % config["num_attention_heads"]:
        raise UserError(
            f"its hidden_size {config['hidden_size']} is not divisible by its num_attention_heads "
            f"{config['num_attention_heads']}"
        )
    config["num_layers"] = size_of(settings, "num_hidden_layers", MOST_LAYERS)
    config["ffn_hidden_size"] = size_of(settings, "intermediate_size")
    length = max(size_of(settings, "max_position_embeddings") - _BEFORE, 1)
    config["seq_length"] = config["encoder_seq_length"] = config["max_position_embeddings"] = length
    config |= {"activation": "gelu", "embedding_token_dropout": dropout, "mask_token_id": vocabulary.mask_id}
    for ours, (theirs, default) in _SHARES.items():
        value = settings.get(theirs, default)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UserError(f"its {theirs} is {str(value)[:50]!r}, no number from 0 on")
        config[ours] = value
    config[_MULTIPLE] = size_of({_MULTIPLE: 128, **settings}, _MULTIPLE)
    return config, vocabulary.vocab_size


def _to_settings(config: Mapping[str, Any], words: int) -> dict[str, Any]:
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if config.get("kv_channels") not in (None, hidden // heads) or hidden % heads:
        raise UserError(f"its heads are of {config.get('kv_channels')}, ESM-2's of hidden_size / num_attention_heads")
    if (activation := config.get("activation", "gelu")) != "gelu":
        raise UserError(f"its activation is {str(activation)[:50]!r}, ESM-2's is gelu")
    vocabulary = esm2nv()
    if words != vocabulary.vocab_size:
        raise UserError(f"its vocabulary has {words} tokens, ESM-2's {vocabulary.vocab_size}")
    return {
        "architectures": [_CLASS],
        "model_type": _TYPE,
        "vocab_size": words,
        "pad_token_id": vocabulary.pad_id,
        "mask_token_id": vocabulary.mask_id,
        _MULTIPLE: config[_MULTIPLE],  # ours, so that what is read again is as it was; transformers pass it over
        **{name: config[ours] for ours, name in _SIZES.items()},
        "num_hidden_layers": config["num_layers"],
        "intermediate_size": config["ffn_hidden_size"],
        "max_position_embeddings": size_of(config, "max_position_embeddings") + _BEFORE,
        "position_embedding_type": "rotary",
        "token_dropout": bool(config.get("embedding_token_dropout", True)),
        **{name: config.get(ours, default) for ours, (name, default) in _SHARES.items()},
        **_ONLY,
    }


def _tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    named = {f"{name}_token": f"<{name}>" for name in ("cls", "pad", "eos", "unk", "mask")}
    settings = {"tokenizer_class": "EsmTokenizer", "model_max_length": config["max_position_embeddings"], **named}
    return {_VOCABULARY: "\n".join(esm2nv().tokens), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    file, expected = directory / _VOCABULARY, "\n".join(esm2nv().tokens)
    if file.is_file():
        with file.open("rb") as opened:
            found = opened.read(2 * len(expected))  # whatever is longer is another
        if found.split() != expected.encode().split():
            raise UserError(f"its {_VOCABULARY} is not ESM-2's: it reads other letters")
    return {}


ESM2 = Architecture(
    ours=_OURS, model_type=_TYPE, name=_CLASS, to_settings=_to_settings, to_config=_to_config, prefix="esm.",
    ends=_ENDS, outside=_HEAD, stack=("encoder.layers", "encoder.layer"), layer=_LAYER,
    computed=(r".*rotary_embeddings\.inv_freq", r"embeddings\.position_ids"),
    copies={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
    frequencies="esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq",
    contacts="esm.contact_head.regression", tokenizer=_tokenizer, read_tokenizer=_read_tokenizer,
)  # fmt: skip
