# SPDX-License-Identifier: Apache-2.0
"""ESM-2 with Transformer Engine's names of weights, in which a layer norm belongs to the module that follows it.

Sources: `NVEsmForMaskedLM` of bionemo-recipes. Rows of a fused projection are ordered by head, as ours are.
"""

from collections.abc import Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.formats.weight_names import WeightNames
from bionemo.models.hugging_face_esm import EMBEDDINGS

RECIPES_TYPE = "nv_esm"  # `model_type` in config.json of bionemo-recipes
_RECIPES_LAYER = {
    "input_layernorm": "self_attention.layernorm_qkv.layer_norm_",
    "self_attention.linear_qkv": "self_attention.layernorm_qkv.",
    "self_attention.linear_proj": "self_attention.proj.",
    "pre_mlp_layernorm": "layernorm_mlp.layer_norm_",
    "mlp.linear_fc1": "layernorm_mlp.fc1_",
    "mlp.linear_fc2": "layernorm_mlp.fc2_",
}
_RECIPES_REQUIRED = {  # keys of config.json that transformers' EsmConfig lacks, and their defaults
    "encoder_activation": "gelu", "qkv_weight_interleaved": True, "fuse_qkv_params": True, "attn_mask_type": "padding",
}  # fmt: skip


def _parameters(modules: Mapping[str, str], ours: str = "", theirs: str = "") -> dict[str, str]:
    """Return the names of the weight and the bias of each module, with a prefix of our names and one of theirs."""
    return {
        f"{ours}{module}.{kind}": f"{theirs}{name}{kind}"
        for module, name in modules.items()
        for kind in ("weight", "bias")
    }


RECIPES_NAMES = WeightNames(
    {
        **EMBEDDINGS,
        **_parameters({"lm_head.dense": "lm_head.dense.", "lm_head.layer_norm": "lm_head.decoder.layer_norm_"}),
        "lm_head.bias": "lm_head.decoder.bias",
        **_parameters(_RECIPES_LAYER, "encoder.layers.{}.", "esm.encoder.layers.{}."),
    },
    copies={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
    pads_vocabulary=False, ignores_padding=True,
)  # fmt: skip


def update_recipes_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate config.json of bionemo-recipes to that of EsmForMaskedLM.

    Raises:
        UserError: if a key has a value that gives the weights another meaning.
    """
    if settings.get("model_type") != RECIPES_TYPE:
        return settings
    for key, value in _RECIPES_REQUIRED.items():
        if (found := settings.get(key, value)) != value:
            raise UserError(f"{key} in its config.json is {str(found)[:50]!r}; only {value} is supported")
    classes = settings.get("architectures")
    names = [str(each).removeprefix("NV") for each in classes] if isinstance(classes, list) else classes
    return {**settings, "architectures": names}
