# SPDX-License-Identifier: Apache-2.0
"""Where tensors can be read from block by block: a checkpoint, or memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Tensors of a whole model by the names that megatron/state.py gives them."""

    @property
    def path(self) -> Path:
        """Where they come from, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The `model` section of the configuration they were saved with, as far as it is known."""

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """Shape of every tensor; with a group such as "weights", of its tensors under their names in it."""

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Read a tensor, or the block of it that begins at `offset` and has `shape`."""


@dataclass(frozen=True)
class TensorsInMemory:
    """Weights that have been read from elsewhere, by their names in the model."""

    path: Path
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        prefix = "" if group == "weights" else "weights/"
        return {prefix + name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        whole = self.weights[name.removeprefix("weights/")]
        if offset is None or shape is None:
            return whole
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
