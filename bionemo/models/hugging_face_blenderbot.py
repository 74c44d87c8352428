# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv and MegaMolBART in the Hugging Face format: BlenderbotForConditionalGeneration, which has pre-LN layers."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.formats.huggingface.architecture import Architecture, Config, Settings
from bionemo.formats.huggingface.tokenizer import write_tokenizer
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.tokenizers import TokenTable

_TIED, _EPSILON = "share_decoder_tokens_head_embeddings", 1e-5  # of all layer norms; config.json has no key for it
_WORDS, _POSITIONS = "model.shared.weight", "model.encoder.embed_positions.weight"
_LAYER = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.out_proj",
    "pre_mlp_layernorm": "final_layer_norm",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
}
_DECODER_LAYER = {
    **_LAYER,
    "pre_cross_attn_layernorm": "encoder_attn_layer_norm",
    "cross_attention.linear_q": "encoder_attn.q_proj",
    "cross_attention.linear_kv": "encoder_attn.k_proj encoder_attn.v_proj",
    "cross_attention.linear_proj": "encoder_attn.out_proj",
}
_NAMES = WeightNames(
    {
        "word_embeddings.weight": _WORDS, "position_embeddings.weight": _POSITIONS,
        "lm_head.weight": "lm_head.weight", "lm_head.bias": "final_logits_bias",
        **module_names({f"{stack}.final_layernorm": f"model.{stack}.layer_norm" for stack in ("encoder", "decoder")}),
        **module_names(_LAYER, "encoder.layers.{}.", "model.encoder.layers.{}."),
        **module_names(_DECODER_LAYER, "decoder.layers.{}.", "model.decoder.layers.{}."),
    },
    only_if={"lm_head.bias": (_TIED, True), "lm_head.weight": (_TIED, False)},
    copies={
        "model.decoder.embed_positions.weight": _POSITIONS,
        **{f"model.{stack}.embed_tokens.weight": _WORDS for stack in ("encoder", "decoder")},
    },
    pads_vocabulary=False, qkv_by_head=False, rows=("lm_head.bias",),
)  # fmt: skip
_OF_BOTH = {"layers": "num_layers", "attention_heads": "num_attention_heads", "ffn_dim": "ffn_hidden_size"}


def _read_settings(settings: Settings, config: Config) -> dict[str, Any]:
    for theirs, ours in _OF_BOTH.items():
        if settings.get(f"decoder_{theirs}") != config[ours]:
            raise UserError(f"decoder_{theirs} is not equal to encoder_{theirs}, {config[ours]}")
    tied = settings.get("tie_word_embeddings", True)
    if type(tied) is not bool:
        raise UserError(f"tie_word_embeddings in its config.json is {str(tied)[:50]!r}, neither true nor false")
    return {
        "activation": "gelu", "layernorm_epsilon": _EPSILON, _TIED: tied,
        "max_position_embeddings": get_size(settings, "max_position_embeddings"),
    }  # fmt: skip


def _write_settings(
    vocabulary: Callable[[Config], TokenTable], config: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    for key, value in {"activation": "gelu", "layernorm_epsilon": _EPSILON}.items():
        if (found := config.get(key, value)) != value:
            raise UserError(f"its {key} is {str(found)[:50]!r}; that of Blenderbot is {value}")
    tokens = vocabulary(config)
    return {
        "max_position_embeddings": get_size(config, "max_position_embeddings"),
        "tie_word_embeddings": config.get(_TIED) is not False,
        "pad_token_id": tokens.pad_id, "bos_token_id": tokens.bos_id, "eos_token_id": tokens.eos_id,
        "decoder_start_token_id": tokens.bos_id,
        # the defaults suit dialogues: no repetition of the input, and an end token at the last position
        "encoder_no_repeat_ngram_size": 0, "forced_eos_token_id": None,
        **{f"decoder_{theirs}": config[ours] for theirs, ours in _OF_BOTH.items()},
    }  # fmt: skip


def blenderbot_architecture(
    title: str, recognizes: Callable[[Settings], bool], vocabulary: Callable[[Config], TokenTable], letters: str,
    read_tokenizer: Callable[[Path], dict[str, Any]],
) -> Architecture:  # fmt: skip
    """Return an architecture of the class BlenderbotForConditionalGeneration.

    Args:
        title: name for messages.
        recognizes: tells whether a config.json belongs to it.
        vocabulary: returns the tokens for the `model` section of our configuration.
        letters: regular expression of one token of a text.
        read_tokenizer: see Architecture.
    """

    def write_files(config: Config) -> dict[str, str]:
        length = get_size(config, "max_position_embeddings")
        return write_tokenizer(vocabulary(config), length, letters, begin_and_end=False)

    return Architecture(
        title=title, model_type="blenderbot", class_name="BlenderbotForConditionalGeneration", prefix="model.",
        names=_NAMES, recognizes=recognizes,
        written_copies=lambda config: [
            copy for copy, name in _NAMES.copies.items() if name == _POSITIONS or config.get(_TIED) is False
        ],
        zeros={"final_logits_bias": (1, "vocab_size")},
        required={"activation_function": "gelu", "scale_embedding": False},
        sizes={"hidden_size": "d_model", **{ours: f"encoder_{theirs}" for theirs, ours in _OF_BOTH.items()}},
        numbers={  # with the defaults of BlenderbotConfig
            "hidden_dropout": ("dropout", 0.1), "attention_dropout": ("attention_dropout", 0.0),
            "init_method_std": ("init_std", 0.02),
        },
        read_settings=_read_settings, write_settings=partial(_write_settings, vocabulary),
        write_tokenizer=write_files, read_tokenizer=read_tokenizer,
    )  # fmt: skip
