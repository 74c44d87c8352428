# SPDX-License-Identifier: Apache-2.0
"""One set of weights out of those that v1's ranks of tensor and pipeline parallelism held.

A weight that tensor parallelism divided is joined along the dimension that the table names; the others are equal on
all ranks. Each pipeline stage counts its layers from 0, and the last has a copy of the word table of the first
(NeMo 1.23, `ParallelTransformer` and `MegatronModule.initialize_word_embeddings`).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bionemo.errors import UserError
from bionemo.interop.v1_names import Names, Weight, check, first_few

_PREFIX = re.compile(r"^model\.(module\.)?")  # the second with megatron_amp_O2
_LAYER = re.compile(r"(?<=^language_model\.encoder\.layers\.)[0-9]{1,4}(?=\.)")
_TABLE, _COPY = "language_model.embedding.word_embeddings.weight", "word_embeddings.weight"
_NO_WEIGHT = (".inv_freq", "._extra_state", ".position_ids")  # computed from the sizes, or empty


def join(names: Names, config: Mapping[str, Any], stages: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Rename and put together `stages[pipeline rank][tensor rank]`, which is emptied on the way to save memory.

    Raises:
        UserError: when weights are missing, unknown, of a wrong shape or type, or differ between ranks that should
            hold the same.
    """
    if config.get("megatron_legacy"):
        raise UserError("its query, key and value are in the order of megatron_legacy, which is not read")
    table = names.table(config)
    ours = {weight.v1: name for name, weight in table.items()}
    whole: dict[str, Tensor] = {}
    first = 0
    for ranks in stages:
        parts, layers = zip(*(_renamed(rank, ours, first) for rank in ranks), strict=True)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise UserError("its ranks of tensor parallelism do not hold the same weights")
        for name in list(parts[0]):
            weight = _joined(name, table[name], [part.pop(name) for part in parts])
            if name in whole and not torch.equal(whole[name], weight):
                raise UserError(f"its pipeline stages differ in {name}")
            whole[name] = weight
        first += max(layers)
    check(table, whole)
    return whole


def _renamed(rank: dict[str, Tensor], ours: Mapping[str, str], first: int) -> tuple[dict[str, Tensor], int]:
    """Move a rank's weights to our names; with it the number of its layers, before which there are `first`."""
    found: dict[str, Tensor] = {}
    unknown, layers = [], 0
    for name in list(rank):
        v1 = _PREFIX.sub("", name)
        if layer := _LAYER.search(v1):
            layers = max(layers, int(layer[0]) + 1)
            v1 = _LAYER.sub(str(int(layer[0]) + first), v1)
        known = ours.get(_TABLE if v1 == _COPY else v1)
        if known and known not in found:
            found[known] = rank.pop(name)
        elif not name.endswith(_NO_WEIGHT):
            unknown.append(name)
    if unknown:
        raise UserError(f"it has {len(unknown)} unknown weights: {first_few(unknown)}")
    return found, layers


def _joined(name: str, weight: Weight, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.dim()) for part in parts}) > 1 or parts[0].dim() != len(weight.shape):
        raise UserError(f"its parts of {name} do not fit together")
    if weight.divided is None:
        if any(not torch.equal(part, parts[0]) for part in parts[1:]):
            raise UserError(f"its ranks of tensor parallelism differ in {name}")
        return parts[0]
    try:
        whole = torch.cat(parts, weight.divided) if len(parts) > 1 else parts[0]
    except RuntimeError as error:
        raise UserError(f"its parts of {name} do not fit together") from error
    return whole[: weight.shape[0]] if weight.padded else whole
