# SPDX-License-Identifier: Apache-2.0
"""Between checkpoints and `.nemo` archives."""

import math
from pathlib import Path

from bionemo.checkpoint import Checkpoint, tools
from bionemo.errors import UserError
from bionemo.interop import nemo_archive
from bionemo.interop.v1_models import names_of


def convert(source: Path, target: Path) -> None:
    """Write the weights of a checkpoint as a .nemo archive, or those of an archive as a checkpoint.

    Raises:
        UserError: when the source cannot be read, or there is no conversion between the two.
    """
    if is_archive(source) == is_archive(target):
        raise UserError(
            f"{source} -> {target}: one of them must end in .nemo; a checkpoint needs no conversion between layouts, "
            "every tensor, pipeline and data-parallel size reads it as it is"
        )
    if is_archive(source):
        archive = nemo_archive.read(source)
        state = {"config": archive.config, "model": {"model._target_": names_of(archive.config).ours}}
        tools.write_weights(target, state, iter(archive.weights.items()))
    else:
        export(source, target)


def export(source: Path, target: Path) -> None:
    """Write the weights of a checkpoint as a .nemo archive.

    Raises:
        UserError: when the checkpoint is damaged or does not know its model, or there is no room.
    """
    weights = tools.weights_of(source)
    config = Checkpoint(source).state.get("config")
    if config is None:
        raise UserError(f"{source} does not hold the configuration of its model, which a .nemo file needs")
    nemo_archive.write(target, config, weights)


def describe(path: Path, every_tensor: bool = False) -> str:
    """Say in lines what a checkpoint or an archive holds.

    Raises:
        UserError: when it cannot be read.
    """
    if not is_archive(path):
        return tools.describe(path, every_tensor)
    archive = nemo_archive.read(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in archive.weights.items()}
    lines = {
        "archive": str(path),
        "model": names_of(archive.config).ours,
        "parameters": f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors",
        "layers": str(archive.config.get("num_layers", "not said")),
        "hidden size": str(archive.config.get("hidden_size", "not said")),
    }
    text = [f"{name:12} {value}" for name, value in lines.items()]
    if every_tensor:
        text += [f"  {name}  {' x '.join(map(str, shape))}" for name, shape in shapes.items()]
    return "\n".join(text)


def is_archive(path: Path) -> bool:
    """Whether a path names a .nemo archive."""
    return path.suffix == ".nemo"
