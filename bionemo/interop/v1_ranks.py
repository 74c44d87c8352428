# SPDX-License-Identifier: Apache-2.0
"""One set of weights out of those that v1's ranks of tensor and pipeline parallelism held.

A weight that tensor parallelism divided is joined along the dimension that the table names; the others are equal on
all ranks. Each pipeline stage counts the layers of a stack from 0; the last has a copy of the word table of the first,
and so has the first that holds a decoder (NeMo 1.23, `ParallelTransformer`, `MegatronTokenLevelEncoderDecoderModule`,
`MegatronModule.initialize_word_embeddings`).
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.interop.shape_check import first_few
from bionemo.interop.v1_names import Names, Weight, check, refuse_other_layers

_TABLE, _COPY = "word_embeddings.weight", "word_embeddings.weight"  # by our name, and by v1's on the last stage
_NO_WEIGHT = (".inv_freq", "._extra_state", ".position_ids")  # computed from the sizes, or empty


def join(names: Names, config: Mapping[str, Any], stages: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Rename and put together `stages[pipeline rank][tensor rank]`, which is emptied on the way to save memory.

    Raises:
        UserError: when weights are missing, unknown, of a wrong shape or type, or differ between ranks that should
            hold the same.
    """
    refuse_other_layers(config)
    table = names.table(config)
    whole: dict[str, Tensor] = {}
    before: Counter[str] = Counter()  # layers of each stack in earlier stages
    for ranks in stages:
        parts, layers = zip(*(_renamed(rank, names, table, before) for rank in ranks), strict=True)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise UserError("its ranks of tensor parallelism do not hold the same weights")
        for name in list(parts[0]):
            weight = _joined(name, table[name], [part.pop(name) for part in parts])
            if name in whole and not _same(whole[name], weight):
                raise UserError(f"its pipeline stages differ in {name}")
            whole[name] = weight
        before += layers[0]
    check(table, whole)
    return whole


def _renamed(
    rank: dict[str, Tensor], names: Names, table: Mapping[str, Weight], before: Counter[str]
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Move a rank's weights to our names; with them, how many layers of each stack it has."""
    ours = {v1: name for name, weight in table.items() for v1 in names.spellings(weight.v1)} | {_COPY: _TABLE}
    prefix = re.compile(rf"^{re.escape(names.prefix)}(module\.)?")  # the second with megatron_amp_O2
    stacks = "|".join(re.escape(stack.v1) for stack in names.stacks.values())
    in_layer = re.compile(rf"^({stacks})\.layers\.([0-9]{{1,4}})\.")
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    layers: Counter[str] = Counter()
    for name in list(rank):
        v1 = prefix.sub("", name)
        if layer := in_layer.match(v1):
            stack, number = layer[1], int(layer[2])
            layers[stack] = max(layers[stack], number + 1)
            v1 = f"{stack}.layers.{number + before[stack]}.{v1[layer.end() :]}"
        if known := ours.get(v1):
            weight = rank.pop(name)
            if not _same(found.setdefault(known, weight), weight):
                raise UserError(f"its {v1} is not its {table[known].v1}: tables that are not shared are not read")
        elif not name.endswith(_NO_WEIGHT):
            unknown.append(name)
    if unknown:
        raise UserError(f"it has {len(unknown)} unknown weights: {first_few(unknown)}")
    return found, layers


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _joined(name: str, weight: Weight, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.dim()) for part in parts}) > 1 or parts[0].dim() != len(weight.shape):
        raise UserError(f"its parts of {name} do not fit together")
    if weight.divided is None:
        if any(not _same(part, parts[0]) for part in parts[1:]):
            raise UserError(f"its ranks of tensor parallelism differ in {name}")
        return parts[0]
    try:
        whole = torch.cat(parts, weight.divided) if len(parts) > 1 else parts[0]
    except RuntimeError as error:
        raise UserError(f"its parts of {name} do not fit together") from error
    return whole[: weight.shape[0]] if weight.padded else whole
