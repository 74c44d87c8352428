# SPDX-License-Identifier: Apache-2.0
"""ESM-2, and ESM-1b and ESM-1v before it, after transformers' EsmConfig and EsmForMaskedLM.

There and in the published weights the words are ours.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from bionemo.tokenizers.esm import esm2nv

_CLASS, _TYPE = "EsmForMaskedLM", "esm"
_VOCABULARY, _MULTIPLE = "vocab.txt", "make_vocab_size_divisible_by"
_BEFORE = esm2nv().pad_id + 1  # their positions begin behind that of padding
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
_POSITIONS: Modules = {"position_embeddings.table": ("embeddings.position_embeddings", "LH", "")}
_NORM: Modules = {"embedding_layernorm": ("embeddings.layer_norm", "H", "H")}
# The only values under which the weights mean what they mean here; they are also what is meant when nothing is said.
_ONLY = {
    "hidden_act": "gelu", "is_folding_model": False, "is_decoder": False, "add_cross_attention": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_SIZES = {"hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads"}
_SHARES: Shares = {  # ours -> theirs, and EsmConfig's default
    "hidden_dropout": ("hidden_dropout_prob", 0.1), "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "layernorm_epsilon": ("layer_norm_eps", 1e-12), "init_method_std": ("initializer_range", 0.02),
}  # fmt: skip


class _Form(NamedTuple):
    """What differs between them.

    Attributes:
        name: for messages.
        ours: what our configuration says of every model of this form.
        positions: their position_embedding_type.
        only: as _ONLY, of this form alone.
        flags: ours -> theirs.
    """

    name: str
    ours: Mapping[str, Any]
    positions: str
    only: Mapping[str, Any]
    flags: Mapping[str, str]


_FORM_2 = _Form(
    name="ESM-2",
    ours={
        "_target_": "bionemo.models.esm2nv.ESM2nv",
        "position_embedding_type": "rope",
        "mask_token_id": esm2nv().mask_id,
    },
    positions="rotary",
    only=_ONLY | {"rope_theta": 10000.0, "emb_layer_norm_before": False},
    flags={"embedding_token_dropout": "token_dropout"},
)
_FORM_1B = _Form(
    name="ESM-1b",
    ours={"_target_": "bionemo.models.esm1b.ESM1b", "position_embedding_type": "learned_absolute"},
    positions="absolute",
    only=_ONLY,
    flags={"embedding_token_dropout": "token_dropout", "embedding_layer_norm": "emb_layer_norm_before"},
)


def _to_config(form: _Form, settings: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    refuse_other_values(settings, form.only)
    vocabulary = esm2nv()
    ids = {"vocab_size": vocabulary.vocab_size, "mask_token_id": vocabulary.mask_id, "pad_token_id": vocabulary.pad_id}
    for key, value in ids.items():
        if (said := settings.get(key)) != value:
            raise UserError(
                f"its {key} is {str(said)[:50]!r}, of {form.name}'s vocabulary {value}: it reads other letters"
            )
    config: dict[str, Any] = {**form.ours, "kv_channels": None, "activation": "gelu"}
    config |= {ours: size_of(settings, theirs) for ours, theirs in _SIZES.items()}
    refuse_uneven_heads(settings, "hidden_size", "num_attention_heads")
    config["num_layers"] = size_of(settings, "num_hidden_layers", MOST_LAYERS)
    config["ffn_hidden_size"] = size_of(settings, "intermediate_size")
    length = max(size_of(settings, "max_position_embeddings") - _BEFORE, 1)
    config["seq_length"] = config["encoder_seq_length"] = config["max_position_embeddings"] = length
    config |= {ours: _flag(settings, theirs) for ours, theirs in form.flags.items()}
    config |= read_shares(settings, _SHARES)
    config[_MULTIPLE] = size_of({_MULTIPLE: 128, **settings}, _MULTIPLE)
    return config, vocabulary.vocab_size


def _flag(settings: Mapping[str, Any], key: str) -> bool:
    said = settings.get(key)
    if said is None:  # as EsmConfig has it when nothing is said
        return False
    if type(said) is not bool:
        raise UserError(f"its {key} is {str(said)[:50]!r}, neither true nor false")
    return said


def _to_settings(form: _Form, config: Mapping[str, Any], words: int) -> dict[str, Any]:
    refuse_other_heads(config, form.name)
    if (activation := config.get("activation", "gelu")) != "gelu":
        raise UserError(f"its activation is {str(activation)[:50]!r}, {form.name}'s is gelu")
    vocabulary = esm2nv()
    if words != vocabulary.vocab_size:
        raise UserError(f"its vocabulary has {words} tokens, {form.name}'s {vocabulary.vocab_size}")
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
        "position_embedding_type": form.positions,
        **{theirs: bool(config.get(ours, True)) for ours, theirs in form.flags.items()},
        **write_shares(config, _SHARES),
        **form.only,
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


def _architecture(form: _Form, **others: Any) -> Architecture:
    return Architecture(
        ours=form.ours["_target_"], model_type=_TYPE, name=_CLASS, positions=form.positions, prefix="esm.",
        to_settings=partial(_to_settings, form), to_config=partial(_to_config, form), outside=_HEAD,
        stack=("encoder.layers", "encoder.layer"), layer=_LAYER, contacts="esm.contact_head.regression",
        copies={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias"},
        tokenizer=_tokenizer, read_tokenizer=_read_tokenizer, **others,
    )  # fmt: skip


ESM2 = _architecture(
    _FORM_2,
    ends=_ENDS,
    # the published files still hold a table of positions, with which transformers compute nothing
    computed=(r".*rotary_embeddings\.inv_freq", r"embeddings\.position_(ids|embeddings\.weight)"),
    frequencies="esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq",
)
ESM1B = _architecture(
    _FORM_1B,
    ends={**_ENDS, **_POSITIONS},
    before=_BEFORE,
    optional={"embedding_layer_norm": _NORM},
    computed=(r"embeddings\.position_ids",),
)
