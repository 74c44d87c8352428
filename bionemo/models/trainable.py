# SPDX-License-Identifier: Apache-2.0
"""What training needs of a model."""

from typing import Any, ClassVar

from torch import Tensor, nn

from bionemo.config.schema import ModelConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron.layer_spec import Block
from bionemo.tokenizers import Vocabulary


class Trainable(nn.Module):
    """A model that is trained; its `forward` makes of a batch what the objective is given.

    Attributes:
        config: its keys.
        vocabulary: what it reads.
        transformer_config: of its first stack, in Megatron's words.
    """

    perplexity: ClassVar[bool] = True  # the exponential of its loss is one
    optim_key: ClassVar[str] = "model.optim"  # where its optimizer stands in the configuration, for messages
    config: ModelConfig
    vocabulary: Vocabulary
    transformer_config: Any

    @property
    def identity(self) -> dict[str, Any]:
        """What the shapes of the weights do not tell: which class it is, and which tokens fill its table."""
        return {"model._target_": self.config._target_, "vocabulary": self.vocabulary.identity}

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what `evaluate` tells."""
        return ()

    def blocks(self) -> list[Block]:
        """Stacks of layers."""
        return [module for module in self.children() if isinstance(module, Block)]

    def initialise(self, seed: int) -> None:
        """Draw all weights, the same for every layout."""
        raise NotImplementedError

    def rate_of(self, name: str) -> float:
        """Learning rate of a parameter, as a multiple of the run's."""
        return 1.0

    def evaluate(self, batch: PackedBatch) -> dict[str, Tensor]:
        """What a validation should tell beside the loss: under each name a sum and a count, fp32 [2]."""
        return {}

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the pipeline stage before this one sent; Megatron's schedules call this before every forward."""
