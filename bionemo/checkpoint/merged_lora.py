# SPDX-License-Identifier: Apache-2.0
"""The language model in a checkpoint of a fine-tuned one, with its adapters merged: what all its other uses read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bionemo.checkpoint.source import Shape, TensorSource
from bionemo.common.errors import UserError

ENCODER, HEAD = "encoder.", "head."  # beginnings of the names there
DOWN, UP = "adapter.down", "adapter.up"  # ends of the names of an adapter's matrices, in the place of `weight`
_WEIGHTS = "weights/"


@dataclass(frozen=True)
class LanguageModelWithin:
    """A TensorSource under the names that the language model has by itself."""

    tuned: TensorSource

    @property
    def path(self) -> Path:
        """See TensorSource."""
        return self.tuned.path

    @property
    def config(self) -> Mapping[str, Any]:
        """See TensorSource."""
        return self.tuned.config

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource; weights alone."""
        prefix = "" if group == "weights" else _WEIGHTS
        return {
            prefix + name.removeprefix(ENCODER): shape
            for name, shape in self.tuned.shapes("weights").items()
            if name.startswith(ENCODER) and not name.endswith((DOWN, UP))
        }

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        there = f"{_WEIGHTS}{ENCODER}{name.removeprefix(_WEIGHTS)}"
        weight = self.tuned.read(there, offset, shape)
        stem = there.removesuffix("weight")
        if f"{stem}{UP}" not in self.tuned.shapes():
            return weight
        down, up = self.tuned.read(f"{stem}{DOWN}"), self.tuned.read(f"{stem}{UP}")
        whole = self.shapes("weights")[name.removeprefix(_WEIGHTS)]
        if down.dim() != 2 or up.dim() != 2 or up.shape[1] != len(down) or (len(up), down.shape[1]) != whole:
            raise UserError(
                f"checkpoint {self.path} cannot be used: the adapter of {name} does not fit it; take another, or "
                "remove it"
            )
        if offset is not None and shape is not None:
            up, down = up.narrow(0, offset[0], shape[0]), down.narrow(1, offset[1], shape[1])
        return merged(weight, down, up)


def merged(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """One matrix that does what the three did, W + U D (Hu et al. 2021, 4.1): [out, in], in the weight's format."""
    return (weight.double() + up.double() @ down.double()).to(weight.dtype)
