# SPDX-License-Identifier: Apache-2.0
"""Interface between models and training."""

from typing import Any, ClassVar

from torch import Tensor, nn

from bionemo.config.schema import ModelConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron.layer_spec import PackedTransformerBlock
from bionemo.tokenizers import Vocabulary


class Trainable(nn.Module):
    """A model that can be trained; `forward` returns predictions, or hidden states before the last pipeline stage."""

    has_perplexity: ClassVar[bool] = True  # the exponential of the loss is a perplexity
    optimizer_key: ClassVar[str] = "model.optim"  # configuration key of the optimizer, for messages
    config: ModelConfig  # configuration of the model
    vocabulary: Vocabulary  # tokenizer or alphabet of the input
    transformer_config: Any  # Megatron's configuration of the first block

    @property
    def identity(self) -> dict[str, Any]:
        """Class and vocabulary, which must match those of a checkpoint in addition to the shapes of the weights."""
        return {"model._target_": self.config._target_, "vocabulary": self.vocabulary.identity}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `compute_metrics` returns."""
        return ()

    def blocks(self) -> list[PackedTransformerBlock]:
        """Return the transformer blocks."""
        return [module for module in self.children() if isinstance(module, PackedTransformerBlock)]

    def initialize_weights(self, seed: int) -> None:
        """Initialize all weights; the result must not depend on the parallel layout."""
        raise NotImplementedError

    def learning_rate_factor(self, name: str) -> float:
        """Return the learning rate of a parameter as a multiple of the run's."""
        return 1.0

    def compute_loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the loss summed over the targets of a batch, in fp32, and the number of targets, on the device."""
        raise NotImplementedError

    def count_flops(self, batch: PackedBatch) -> float:
        """Return the FLOPs of an update with a batch, without padding, on all ranks of a model replica; 0: unknown."""
        return 0.0

    def compute_metrics(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return validation metrics beside the loss: a sum and a count for each name, fp32 [2]."""
        return {}

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Set the output of the previous pipeline stage; Megatron's schedules call this before every forward."""
