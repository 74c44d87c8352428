# SPDX-License-Identifier: Apache-2.0
"""Model and optimizer state in checkpoints, stored by offset in the full tensors: any layout can load any checkpoint.

Tensors are named `weights/NAME`, and `SLOT/NAME` for the optimizer state, such as `exp_avg/NAME`.
"""

import logging
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bionemo.checkpoint import WEIGHTS, Piece, TensorSource, split_into_blocks
from bionemo.common.errors import UserError
from bionemo.megatron import groups
from bionemo.megatron.finite import all_finite
from bionemo.megatron.sharding import ParameterShard
from bionemo.megatron.train_step import OptimizerShard, ParallelModel

log = logging.getLogger(__name__)


def weight_pieces(model: ParallelModel) -> list[Piece]:
    """Return the weights that this process writes; each value of the full model is written by exactly one process."""
    trained = [piece for each in _shards_to_write(model) for piece in _pieces(WEIGHTS, each, each.parameter)]
    frozen = [(p, shard) for p, shard in model.shards.items() if shard.is_owner and not p.requires_grad]
    return trained + [
        Piece(f"{WEIGHTS}/{shard.name}", shard.shape, shard.offset, parameter.detach())
        for parameter, shard in frozen[groups.data_rank() :: groups.data_size()]
    ]


def optimizer_pieces(model: ParallelModel, optimizer: Optimizer) -> list[Piece]:
    """Return the optimizer state that this process writes, without step counters: they follow from the schedule."""
    return [
        piece
        for each in _shards_to_write(model)
        for slot, values in optimizer.state[each.parameter].items()
        if slot != "step"
        for piece in _pieces(slot, each, values)
    ]


def load_weights(shards: dict[nn.Parameter, ParameterShard], saved: TensorSource, to_train: bool = False) -> None:
    """Load the weights of this process.

    Args:
        shards: parameters and the shards of the full tensors that they hold.
        saved: source of the weights.
        to_train: raise an error for NaN and infinity instead of a warning: every update of such a weight is NaN.
            Without training they may be in a part of the model that is not used.

    Raises:
        UserError: if names or shapes differ, or if weights to train are not finite.
    """
    check_weight_shapes(shards, saved)
    with torch.no_grad():
        for parameter, shard in shards.items():
            parameter.copy_(saved.read(f"{WEIGHTS}/{shard.name}", shard.offset, tuple(parameter.shape)))
    if all_finite(shards):
        return
    names = [shard.name for parameter, shard in shards.items() if not all_finite([parameter])]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    message = f"{saved.path} has NaN or infinite values in {names[0]}{more}"
    if to_train:
        raise UserError(f"{message}: training cannot continue; use an earlier checkpoint or other weights")
    log.warning("%s: the output of the model may be NaN", message)


def check_weight_shapes(shards: dict[nn.Parameter, ParameterShard], saved: TensorSource) -> None:
    """Raise a UserError that names the first difference of saved weights from this process's parameters.

    Names and shapes are compared.
    """
    shapes = saved.shapes(WEIGHTS)
    difference = ""
    for shard in shards.values():
        found = shapes.get(shard.name)
        if found != shard.shape:
            in_file = "is missing" if found is None else f"has shape {list(found)}"
            difference = f"{shard.name} {in_file} and should have shape {list(shard.shape)}"
            break
    else:
        if groups.pipeline_size() == 1 and (extra := shapes.keys() - {shard.name for shard in shards.values()}):
            difference = f"{min(extra)} is not part of this model"
    if difference.startswith("lm_head.") and not any(name.startswith("lm_head.") for name in shapes):
        raise UserError(
            f"{saved.path} holds an encoder without its language-model head: it has embeddings and can be fine-tuned; "
            "pretraining needs the pretrained model"
        )
    if difference:
        raise UserError(
            f"the weights of {saved.path} belong to another model ({difference}): set model.* to the values of that "
            "model, or set another exp_manager.exp_dir to start a new run"
        )


def load_optimizer(model: ParallelModel, optimizer: Optimizer, saved: TensorSource, steps: int) -> None:
    """Load the optimizer state of this process.

    Args:
        model: model whose parameters the optimizer updates.
        optimizer: optimizer without state.
        saved: checkpoint.
        steps: number of updates made so far.
    """
    names = saved.shapes()
    slots = sorted({name.partition("/")[0] for name in names} - {WEIGHTS})  # such as exp_avg
    for each in model.optimizer_shards:
        state: dict[str, Tensor] = {"step": torch.tensor(float(steps), device=each.parameter.device)}
        for slot in slots:
            if f"{slot}/{each.shard.name}" not in names:  # Muon has other slots for matrices than for the rest
                continue
            values = torch.empty_like(each.parameter)
            for block, offset in _blocks(each, values):
                block.copy_(saved.read(f"{slot}/{each.shard.name}", offset, tuple(block.shape)))
            state[slot] = values
        optimizer.state[each.parameter] = state


def _shards_to_write(model: ParallelModel) -> Iterator[OptimizerShard]:
    """Yield the shards that this process writes; data-parallel ranks with equal shards divide them by size."""
    owned = [each for each in model.optimizer_shards if each.shard.is_owner]
    if model.zero:
        yield from owned
        return
    ends = list(accumulate(each.parameter.numel() for each in owned))
    for each, end in zip(owned, ends, strict=True):
        if (end - 1) * groups.data_size() // ends[-1] == groups.data_rank():
            yield each


def _pieces(group: str, shard: OptimizerShard, values: Tensor) -> Iterator[Piece]:
    for block, offset in _blocks(shard, values):
        yield Piece(f"{group}/{shard.shard.name}", shard.shard.shape, offset, block)


def _blocks(shard: OptimizerShard, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Split a flat slice into views that are rectangular blocks of the full tensor; yield each with its offset."""
    flat, first = values.detach().view(-1), 0
    for offset, shape in split_into_blocks(
        tuple(shard.model_parameter.shape), shard.start, shard.start + flat.numel()
    ):
        size = torch.Size(shape).numel()
        full_offset = tuple(a + b for a, b in zip(shard.shard.offset, offset, strict=True))
        yield flat[first : first + size].view(shape), full_offset
        first += size
