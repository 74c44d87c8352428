# SPDX-License-Identifier: Apache-2.0
"""The language model in the checkpoint of a fine-tuned model, with its LoRA adapters merged into the weights."""

from dataclasses import dataclass

from torch import Tensor

from bionemo.checkpoint.source import WEIGHTS, Shape, TensorView
from bionemo.common.errors import UserError

ENCODER, HEAD = "encoder.", "head."  # prefixes of names in a fine-tuned model
DOWN, UP = "adapter.down", "adapter.up"  # replace `weight` in the names of an adapter's matrices
_PREFIX = f"{WEIGHTS}/"


@dataclass(frozen=True)
class MergedLoRA(TensorView):
    """A TensorSource with the names of the language model alone; `base` is the fine-tuned model's checkpoint."""

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource; only weights."""
        prefix = "" if group == WEIGHTS else _PREFIX
        return {
            prefix + name.removeprefix(ENCODER): shape
            for name, shape in self.base.shapes(WEIGHTS).items()
            if name.startswith(ENCODER) and not name.endswith((DOWN, UP))
        }

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        tuned_name = f"{_PREFIX}{ENCODER}{name.removeprefix(_PREFIX)}"
        weight = self.base.read(tuned_name, offset, shape)
        module = tuned_name.removesuffix("weight")
        if f"{module}{UP}" not in self.base.shapes():
            return weight
        down, up = self.base.read(f"{module}{DOWN}"), self.base.read(f"{module}{UP}")
        expected = self.shapes(WEIGHTS)[name.removeprefix(_PREFIX)]
        if down.dim() != 2 or up.dim() != 2 or up.shape[1] != len(down) or (len(up), down.shape[1]) != expected:
            raise UserError(
                f"checkpoint {self.path} cannot be used: the adapter of {name} has another shape; choose another or "
                "remove it"
            )
        if offset is not None and shape is not None:
            up, down = up.narrow(0, offset[0], shape[0]), down.narrow(1, offset[1], shape[1])
        return merge(weight, down, up)


def merge(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return W + U D (Hu et al. 2021, section 4.1), computed in fp64: [out, in], in the type of the weight."""
    return (weight.double() + up.double() @ down.double()).to(weight.dtype)
