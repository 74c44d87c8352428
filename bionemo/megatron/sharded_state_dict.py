# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of the model and the optimizer, in terms of the whole model: any layout reads any other's.

Tensors are named `weights/NAME`, and for each of the optimizer's, `exp_avg/NAME` and so on.
"""

import logging
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bionemo.checkpoint import Piece, TensorSource, blocks
from bionemo.common.errors import UserError
from bionemo.megatron import groups
from bionemo.megatron.finite import all_finite
from bionemo.megatron.sharding import Placement
from bionemo.megatron.train_step import ParallelModel, Part

log = logging.getLogger(__name__)
WEIGHTS = "weights"


def weight_pieces(model: ParallelModel) -> list[Piece]:
    """What this process writes of the weights: every part of the model is written by exactly one process."""
    trained = [piece for part in _to_write(model) for piece in _pieces(WEIGHTS, part, part.parameter)]
    still = [(p, place) for p, place in model.places.items() if place.ours and not p.requires_grad]
    return trained + [
        Piece(f"{WEIGHTS}/{place.name}", place.shape, place.offset, parameter.detach())
        for parameter, place in still[groups.data_rank() :: groups.data_size()]
    ]


def optimizer_pieces(model: ParallelModel, optimizer: Optimizer) -> list[Piece]:
    """What this process writes of the optimizer's state. Its counters follow from the schedule's."""
    return [
        piece
        for part in _to_write(model)
        for slot, values in optimizer.state[part.parameter].items()
        if slot != "step"
        for piece in _pieces(slot, part, values)
    ]


def load_weights(places: dict[nn.Parameter, Placement], saved: TensorSource, to_train: bool = False) -> None:
    """Give this process's part of a model its weights; those that are not finite are noted in one line.

    Args:
        places: of the parameters.
        saved: the weights.
        to_train: refuse weights that are not finite: every update of them is NaN again. A model that is only used may
            have some in a part that the use does not need.

    Raises:
        UserError: when they belong to another model; the first difference is named. When they are to be trained and
            not finite.
    """
    refuse_other_weights(places, saved)
    with torch.no_grad():
        for parameter, place in places.items():
            parameter.copy_(saved.read(f"{WEIGHTS}/{place.name}", place.offset, tuple(parameter.shape)))
    if wrong := _not_finite(places):
        said = f"{saved.path} holds NaN or infinite values in {wrong}"
        if to_train:
            raise UserError(f"{said}: training cannot go on from it; take an earlier checkpoint or other weights")
        log.warning("%s: what this model computes may be NaN", said)


def refuse_other_weights(places: dict[nn.Parameter, Placement], saved: TensorSource) -> None:
    """Compare names and shapes of saved weights with those of this process's part of a model.

    Raises:
        UserError: naming the first difference.
    """
    shapes = saved.shapes(WEIGHTS)
    for place in places.values():
        found = shapes.get(place.name)
        if found != place.shape:
            there = "missing" if found is None else f"{list(found)}"
            _refuse(saved, f"{place.name} is {there} there and {list(place.shape)} here")
    if groups.stages() == 1 and (others := sorted(shapes.keys() - {place.name for place in places.values()})):
        _refuse(saved, f"{others[0]} is there and not here")


def _not_finite(places: dict[nn.Parameter, Placement]) -> str:
    """Name the weights of this process that are not finite, "" when there are none."""
    if all_finite(places):
        return ""
    names = [place.name for parameter, place in places.items() if not all_finite([parameter])]
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def optimizer_slots(saved: TensorSource) -> list[str]:
    """What the optimizer kept of every parameter.

    Raises:
        UserError: when the checkpoint holds weights alone.
    """
    slots = sorted({name.partition("/")[0] for name in saved.shapes()} - {WEIGHTS})
    if not slots:
        raise UserError(
            f"checkpoint {saved.path} holds weights alone: a run cannot go on from it; start a new one with "
            f"restore_from_path={saved.path}"
        )
    return slots


def load_optimizer(model: ParallelModel, optimizer: Optimizer, saved: TensorSource, steps: int) -> None:
    """Give the optimizer its state after `steps` updates.

    Raises:
        UserError: when the checkpoint holds weights alone.
    """
    slots = optimizer_slots(saved)
    for part in model.parts:
        state: dict[str, Tensor] = {"step": torch.tensor(float(steps), device=part.parameter.device)}
        for slot in slots:
            values = torch.empty_like(part.parameter)
            for block, offset in _blocks(part, values):
                block.copy_(saved.read(f"{slot}/{part.place.name}", offset, tuple(block.shape)))
            state[slot] = values
        optimizer.state[part.parameter] = state


def _refuse(saved: TensorSource, difference: str) -> None:
    raise UserError(
        f"the weights of {saved.path} are those of another model ({difference}): give model.* as they were, "
        "or another exp_manager.exp_dir to begin anew"
    )


def _to_write(model: ParallelModel) -> Iterator[Part]:
    """Parts this process is to write; where data-parallel ranks hold the same, they share the work."""
    ours = [part for part in model.parts if part.place.ours]
    if model.sharded:
        yield from ours
        return
    ends = list(accumulate(part.parameter.numel() for part in ours))
    for part, end in zip(ours, ends, strict=True):
        if (end - 1) * groups.data_size() // ends[-1] == groups.data_rank():
            yield part


def _pieces(group: str, part: Part, values: Tensor) -> Iterator[Piece]:
    for block, offset in _blocks(part, values):
        yield Piece(f"{group}/{part.place.name}", part.place.shape, offset, block)


def _blocks(part: Part, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Views of a part's values that are rectangular blocks of the whole tensor, and where these begin."""
    flat, at = values.detach().view(-1), 0
    for offset, shape in blocks(tuple(part.model_parameter.shape), part.start, part.start + flat.numel()):
        size = torch.Size(shape).numel()
        yield flat[at : at + size].view(shape), tuple(a + b for a, b in zip(part.place.offset, offset, strict=True))
        at += size
