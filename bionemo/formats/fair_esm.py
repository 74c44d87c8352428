# SPDX-License-Identifier: Apache-2.0
"""Files of the package fair-esm: ESM-2, ESM-1b and ESM-1v, as their authors publish them.

    NAME.pt                       arguments of the training, and weights
    NAME-contact-regression.pt    contact regression

The names of the weights are translated to those of transformers' EsmForMaskedLM, which computes the same function.
Source: `esm/pretrained.py` of fair-esm 2.0.0.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.formats.huggingface.directory import Opened
from bionemo.formats.huggingface.files import LoadedTensor
from bionemo.formats.safe_load import check_tensors, load_file

_REGRESSION = "-contact-regression.pt"
_MASK, _WORDS, _HEAD = 32, "embed_tokens.weight", "lm_head.weight"
_LAYER = {
    "self_attn.q_proj": "attention.self.query", "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value", "self_attn.out_proj": "attention.output.dense",
    "self_attn.rot_emb": "attention.self.rotary_embeddings", "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense", "fc2": "output.dense", "final_layer_norm": "LayerNorm",
}  # fmt: skip
_MODULES = {
    "embed_tokens": "esm.embeddings.word_embeddings", "embed_positions": "esm.embeddings.position_embeddings",
    "emb_layer_norm_before": "esm.embeddings.layer_norm", "emb_layer_norm_after": "esm.encoder.emb_layer_norm_after",
    "lm_head": "lm_head", "lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.layer_norm",
    "contact_head.regression": "esm.contact_head.regression",
}  # fmt: skip


def read(path: Path) -> Opened:
    """Return the content of config.json, and the tensors by their names in transformers.

    Raises:
        UserError: if the file cannot be read, or holds another model.
    """
    if path.name.endswith(_REGRESSION):
        model = path.name.removesuffix(_REGRESSION)
        raise UserError(f"it is the contact regression of {model}.pt: give {model}.pt, which reads this file, too")
    saved = load_file(path, [Namespace])
    match saved:
        case {"cfg": {"model": Namespace() as arguments}, "model": dict(state)}:
            arch = "esm2"
        case {"args": Namespace() as arguments, "model": dict(state)}:
            arch = str(vars(arguments).get("arch"))
        case _:
            raise UserError(
                "it is not a file of fair-esm, which holds args or cfg, and model: save the model with "
                "save_pretrained of transformers and give the directory"
            )
    if arch not in ("esm2", "roberta_large"):
        raise UserError(f"its arch is {arch[:50]!r}; supported are ESM-2, and roberta_large (ESM-1b, ESM-1v)")
    weights = {_short(name): tensor for name, tensor in check_tensors(state).items()}
    if (regression := path.with_name(path.stem + _REGRESSION)).is_file():
        weights |= check_tensors(load_file(regression).get("model"))
    if arch == "roberta_large" and _WORDS in weights:  # fair-esm sets the vector of the mask token to 0
        head = weights.pop(_HEAD, weights[_WORDS])
        tied, weights[_WORDS] = torch.equal(head, weights[_WORDS]), weights[_WORDS].clone()
        weights[_WORDS][_MASK:] = 0
        weights[_HEAD] = weights[_WORDS] if tied else head
    settings = _settings({name.removeprefix("encoder_"): value for name, value in vars(arguments).items()}, weights)
    return settings, [(_translate(name), LoadedTensor(tensor)) for name, tensor in weights.items()]


def _short(name: str) -> str:
    return name.removeprefix("encoder.").removeprefix("sentence_encoder.")


def _settings(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    positions = weights.get("embed_positions.weight")
    inner = weights.get("layers.0.fc1.bias")
    return {
        "model_type": "esm", "architectures": ["EsmForMaskedLM"], "vocab_size": 33, "pad_token_id": 1,
        "mask_token_id": _MASK, "layer_norm_eps": 1e-5, "hidden_size": arguments.get("embed_dim"),
        "num_hidden_layers": arguments.get("layers"), "num_attention_heads": arguments.get("attention_heads"),
        "intermediate_size": None if inner is None else len(inner),
        "token_dropout": arguments.get("token_dropout", False), "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "position_embedding_type": "rotary" if positions is None else "absolute",
        "max_position_embeddings": 1026 if positions is None else len(positions),
        "emb_layer_norm_before": "emb_layer_norm_before.weight" in weights,
    }  # fmt: skip


def _translate(name: str) -> str:
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name):
        return f"esm.encoder.layer.{layer[1]}.{_LAYER.get(layer[2], layer[2])}.{layer[3]}"
    module, _, kind = name.rpartition(".")
    if name == _HEAD:  # a copy of the word table
        return "lm_head.decoder.weight"
    return f"{_MODULES.get(module, module)}.{kind}"
