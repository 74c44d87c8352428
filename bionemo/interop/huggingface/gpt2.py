# SPDX-License-Identifier: Apache-2.0
"""GPT-2, after transformers' GPT2Config and GPT2LMHeadModel, whose matrices lie as of a convolution: inputs first."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.interop.huggingface.names import Architecture, Modules
from bionemo.interop.huggingface.settings import (
    Shares,
    read_shares,
    refuse_other_heads,
    refuse_other_values,
    refuse_uneven_heads,
    write_shares,
)
from bionemo.interop.shape_check import MOST_LAYERS, size_of
from bionemo.tokenizers.gpt2 import read_gpt2

_OURS, _CLASS, _TYPE = "bionemo.models.gpt3.GPT3", "GPT2LMHeadModel", "gpt2"
_FILES = {"vocab.json": "vocab_file", "merges.txt": "merge_file"}
_WORDS, _MULTIPLE = 50257, "make_vocab_size_divisible_by"  # of OpenAI's vocabulary, whose last ends a document
_ENDS: Modules = {
    "word_embeddings": ("wte", "VH", ""),
    "position_embeddings": ("wpe", "LH", ""),
    "decoder.final_layernorm": ("ln_f", "H", "H"),
}
_LAYER: Modules = {
    "input_layernorm": ("ln_1", "H", "H"),
    "self_attention.linear_qkv": ("attn.c_attn", "QH", "Q"),
    "self_attention.linear_proj": ("attn.c_proj", "HH", "H"),
    "pre_mlp_layernorm": ("ln_2", "H", "H"),
    "mlp.linear_fc1": ("mlp.c_fc", "FH", "F"),
    "mlp.linear_fc2": ("mlp.c_proj", "HF", "H"),
}
# The only values under which the weights mean what they mean here; they are also what is meant when nothing is said.
_ONLY = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False, "tie_word_embeddings": True,
}  # fmt: skip
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # the first is GPT-2's own
_SIZES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
_SHARES: Shares = {  # ours -> theirs, and GPT2Config's default
    "hidden_dropout": ("resid_pdrop", 0.1), "attention_dropout": ("attn_pdrop", 0.1),
    "layernorm_epsilon": ("layer_norm_epsilon", 1e-5), "init_method_std": ("initializer_range", 0.02),
}  # fmt: skip


def _to_config(settings: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    refuse_other_values(settings, _ONLY)
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UserError(f"its activation_function is {str(activation)[:50]!r}: {', '.join(_ACTIVATIONS)} are read")
    config: dict[str, Any] = {"_target_": _OURS, "position_embedding_type": "learned_absolute", "kv_channels": None}
    config |= {ours: size_of(settings, theirs) for ours, theirs in _SIZES.items()}
    refuse_uneven_heads(settings, "n_embd", "n_head")
    config["num_layers"] = size_of(settings, "n_layer", MOST_LAYERS)
    inner = settings.get("n_inner")
    config["ffn_hidden_size"] = 4 * config["hidden_size"] if inner is None else size_of(settings, "n_inner")
    config["seq_length"] = config["encoder_seq_length"] = config["max_position_embeddings"]
    config["activation"] = _ACTIVATIONS[activation]
    config |= read_shares(settings, _SHARES)
    config[_MULTIPLE] = size_of({_MULTIPLE: 128, **settings}, _MULTIPLE)
    return config, size_of(settings, "vocab_size")


def _to_settings(config: Mapping[str, Any], words: int) -> dict[str, Any]:
    refuse_other_heads(config, "GPT-2")
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if (activation := config.get("activation")) not in theirs:
        raise UserError(f"its activation {str(activation)[:50]!r} is none of {', '.join(theirs)}")
    end = words - 1 if words == _WORDS else None
    return {
        "architectures": [_CLASS],
        "model_type": _TYPE,
        "vocab_size": words,
        _MULTIPLE: config[_MULTIPLE],  # ours, so that what is read again is as it was; transformers pass it over
        **{name: config[ours] for ours, name in _SIZES.items()},
        "n_layer": config["num_layers"],
        "n_inner": config["ffn_hidden_size"],
        "activation_function": theirs[activation],
        **write_shares(config, _SHARES),
        "embd_pdrop": config.get("hidden_dropout", 0.1),
        "bos_token_id": end,
        "eos_token_id": end,
        **_ONLY,
    }


def _tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    """The user's files, where they still are and are a vocabulary: a configuration may name any file of theirs."""
    given = config.get("tokenizer") or {}
    if not all(given.get(key) and Path(given[key]).is_file() for key in _FILES.values()):
        return {}
    try:
        read_gpt2(*(given[key] for key in _FILES.values()))
    except UserError:
        return {}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config["max_position_embeddings"]}
    texts = {name: Path(given[key]).read_text(encoding="utf-8") for name, key in _FILES.items()}
    return texts | {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    paths = {key: directory.absolute() / name for name, key in _FILES.items()}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {"tokenizer": {key: str(path) for key, path in paths.items()}}


GPT2 = Architecture(
    ours=_OURS, model_type=_TYPE, name=_CLASS, to_settings=_to_settings, to_config=_to_config, prefix="transformer.",
    ends=_ENDS, stack=("decoder.layers", "h"), layer=_LAYER, transposed=True,
    tokenizer=_tokenizer, read_tokenizer=_read_tokenizer,
    computed=(r"h\.\d+\.attn\.(masked_)?bias",), copies={"lm_head.weight": "transformer.wte.weight"},
)  # fmt: skip
