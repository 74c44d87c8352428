# SPDX-License-Identifier: Apache-2.0
"""Merge the weights that the tensor and pipeline parallel ranks of NeMo saved separately.

A weight that tensor parallelism divides is concatenated; other weights must be equal on all tensor ranks. Each
pipeline stage numbers its layers from 0. The last stage has a copy of the word embeddings of the first, and so has the
first stage of the decoder (NeMo 1.23, `ParallelTransformer`, `MegatronTokenLevelEncoderDecoderModule`,
`MegatronModule.initialize_word_embeddings`).
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.formats.nemo_models import NemoModel, check_layer_type
from bionemo.formats.shape_check import check_shapes, format_names
from bionemo.formats.weight_names import Weight

_COPY = "word_embeddings.weight"  # name of the copy on later stages; also our name of the original
_NOT_WEIGHTS = (".inv_freq", "._extra_state", ".position_ids")  # computed from the sizes, or empty


def merge_ranks(
    model: NemoModel, config: Mapping[str, Any], stages: list[list[dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """Merge `stages[pipeline rank][tensor rank]`, whose dicts are emptied to save memory, into weights by our names.

    Raises:
        UserError: if weights are missing, unknown, of a wrong shape or type, or differ between ranks that should hold
            the same values.
    """
    check_layer_type(config)
    weights = model.weights(config)
    merged: dict[str, Tensor] = {}
    layers_before: Counter[str] = Counter()  # number of layers of each stack in earlier stages
    for ranks in stages:
        parts, layers = zip(*(_rename(rank, model, weights, layers_before) for rank in ranks), strict=True)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise UserError("its tensor parallel ranks do not hold the same weights")
        for name in list(parts[0]):
            tensor = _concatenate(name, weights[name], [part.pop(name) for part in parts])
            if not same_values(merged.setdefault(name, tensor), tensor):
                raise UserError(f"its pipeline stages differ in {name}")
        layers_before += layers[0]
    check_weights(weights, merged)
    return merged


def check_weights(expected: Mapping[str, Weight], found: Mapping[str, Tensor]) -> None:
    """Raise a UserError if whole weights are missing or unknown, or one has a wrong shape or type."""
    shapes = {name: weight.shape for name, weight in expected.items()}
    check_shapes(shapes, {name: tensor.shape for name, tensor in found.items()})
    for name, tensor in found.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f"{name} is of type {tensor.dtype}")


def same_values(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same type and values."""
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))


def _rename(
    rank: dict[str, Tensor], model: NemoModel, weights: Mapping[str, Weight], layers_before: Counter[str]
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Move the weights of a rank to our names; also return the number of layers of each stack that the rank holds."""
    ours = {weight.theirs[0]: name for name, weight in weights.items()}
    ours |= {copy: ours[original] for copy, original in model.names.copies.items()} | {_COPY: _COPY}
    prefix = re.compile(rf"^{re.escape(model.prefix)}(module\.)?")  # megatron_amp_O2 adds "module."
    stacks = {theirs.partition(".layers.{}.")[0] for theirs in model.names.names.values() if "{}" in theirs}
    in_layer = re.compile(rf"^({'|'.join(map(re.escape, stacks))})\.layers\.([0-9]{{1,4}})\.")
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    layers: Counter[str] = Counter()
    for name in list(rank):
        bare = prefix.sub("", name)
        if layer := in_layer.match(bare):
            stack, number = layer[1], int(layer[2])
            layers[stack] = max(layers[stack], number + 1)
            bare = f"{stack}.layers.{number + layers_before[stack]}.{bare[layer.end() :]}"
        if our_name := ours.get(bare):
            tensor = rank.pop(name)
            if not same_values(found.setdefault(our_name, tensor), tensor):
                raise UserError(
                    f"{bare} differs from {weights[our_name].theirs[0]}; separate embeddings are not supported"
                )
        elif not name.endswith(_NOT_WEIGHTS):
            unknown.append(name)
    if unknown:
        raise UserError(f"{len(unknown)} weights are unknown: {format_names(unknown)}")
    return found, layers


def _concatenate(name: str, weight: Weight, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.dim()) for part in parts}) > 1 or parts[0].dim() != len(weight.shape):
        raise UserError(f"the parts of {name} have incompatible shapes")
    if weight.tensor_parallel_dim is None:
        if any(not same_values(part, parts[0]) for part in parts[1:]):
            raise UserError(f"its tensor parallel ranks differ in {name}")
        return parts[0]
    try:
        whole = torch.cat(parts, weight.tensor_parallel_dim) if len(parts) > 1 else parts[0]
    except RuntimeError as error:
        raise UserError(f"the parts of {name} have incompatible shapes") from error
    # NeMo pads the vocabulary to a multiple that depends on the number of tensor ranks
    return whole[: weight.shape[0]] if weight.padded else whole
