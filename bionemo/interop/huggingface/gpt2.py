# SPDX-License-Identifier: Apache-2.0
"""GPT-2: transformers' GPT2Config and GPT2LMHeadModel, whose matrices are stored as [in, out]."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.interop.huggingface.architecture import Architecture
from bionemo.interop.shape_check import get_size
from bionemo.interop.weight_names import WeightNames, module_names
from bionemo.tokenizers.gpt2 import read_gpt2

_TOKENIZER_FILES = {"vocab.json": "vocab_file", "merges.txt": "merge_file"}
_OPENAI_VOCABULARY = 50257  # size of OpenAI's vocabulary, whose last token ends a document
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # the default first
_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_NAMES = {
    "word_embeddings.weight": "transformer.wte.weight",
    "position_embeddings.weight": "transformer.wpe.weight",
    **module_names({"decoder.final_layernorm": "transformer.ln_f"}),
    **module_names(_LAYER, "decoder.layers.{}.", "transformer.h.{}."),
}


def _read_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UserError(f"activation_function is {str(activation)[:50]!r}; supported are {', '.join(_ACTIVATIONS)}")
    inner = 4 * config["hidden_size"] if settings.get("n_inner") is None else get_size(settings, "n_inner")
    return {"ffn_hidden_size": inner, "activation": _ACTIVATIONS[activation]}


def _write_settings(config: Mapping[str, Any], vocabulary_size: int) -> dict[str, Any]:
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if (activation := config.get("activation")) not in theirs:
        raise UserError(f"activation {str(activation)[:50]!r} is not supported; supported are {', '.join(theirs)}")
    end = vocabulary_size - 1 if vocabulary_size == _OPENAI_VOCABULARY else None
    return {
        "n_inner": config["ffn_hidden_size"],
        "activation_function": theirs[activation],
        "embd_pdrop": config.get("hidden_dropout", 0.1),
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _write_tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's vocabulary files if they are valid: an untrusted configuration may name any file."""
    tokenizer = config.get("tokenizer") or {}
    paths = {name: Path(tokenizer[key]) for name, key in _TOKENIZER_FILES.items() if tokenizer.get(key)}
    if len(paths) < len(_TOKENIZER_FILES) or not all(path.is_file() for path in paths.values()):
        return {}
    try:
        read_gpt2(*paths.values())
    except UserError:
        return {}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config["max_position_embeddings"]}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return texts | {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    paths = {key: directory.absolute() / name for name, key in _TOKENIZER_FILES.items()}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {"tokenizer": {key: str(path) for key, path in paths.items()}}


GPT2 = Architecture(
    title="GPT-2", model_type="gpt2", class_name="GPT2LMHeadModel", prefix="transformer.",
    names=WeightNames(
        _NAMES, copies={"lm_head.weight": "transformer.wte.weight"}, pads_vocabulary=False, qkv_by_head=False,
        transposes=True,
    ),
    config={"_target_": "bionemo.models.gpt3.GPT3", "position_embedding_type": "learned_absolute"},
    required={  # other values give the weights another meaning
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
        "add_cross_attention": False, "tie_word_embeddings": True,
    },
    sizes={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
        "num_layers": "n_layer",
    },
    numbers={  # with the defaults of GPT2Config
        "hidden_dropout": ("resid_pdrop", 0.1), "attention_dropout": ("attn_pdrop", 0.1),
        "layernorm_epsilon": ("layer_norm_epsilon", 1e-5), "init_method_std": ("initializer_range", 0.02),
    },
    read_settings=_read_settings, write_settings=_write_settings,
    write_tokenizer=_write_tokenizer, read_tokenizer=_read_tokenizer,
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),
)  # fmt: skip
