# SPDX-License-Identifier: Apache-2.0
"""Interface of objects from which the tensors of a model are read, and its implementation for tensors in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

WEIGHTS = "weights"  # group of the names of weights, in contrast to those of the optimizer state
Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Tensors of a whole model, by the names of megatron/sharded_state_dict.py."""

    @property
    def path(self) -> Path:
        """Path of the source, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """`model` section of the saved configuration; empty if it is not known."""

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """Return the shape of every tensor; with a group such as "weights", only of its tensors, without prefix."""

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Return a tensor, or its block that starts at `offset` and has `shape`."""


@dataclass(frozen=True)
class TensorView:
    """Base class of a TensorSource that changes what is read from another one."""

    base: TensorSource

    @property
    def path(self) -> Path:
        """See TensorSource."""
        return self.base.path

    @property
    def config(self) -> Mapping[str, Any]:
        """See TensorSource."""
        return self.base.config


@dataclass(frozen=True)
class TensorsInMemory:
    """A TensorSource of weights in memory, by our names."""

    path: Path
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        prefix = "" if group == WEIGHTS else f"{WEIGHTS}/"
        return {prefix + name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        return read_block(self.weights[name.removeprefix(f"{WEIGHTS}/")], offset, shape)


def read_block(tensor: Tensor, offset: Shape | None, shape: Shape | None) -> Tensor:
    """Return the block of a tensor that starts at `offset` and has `shape`; the whole tensor when one is None."""
    if offset is None or shape is None:
        return tensor
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
