# SPDX-License-Identifier: Apache-2.0
"""Baselines for labelled tasks: a model with random weights, and one-hot tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bionemo.inference.batching import DEFAULT_LIMITS, BatchLimits, Ids, split_batches
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import OutputArrays
from bionemo.inference.progress import Advance, no_progress


def with_random_weights(model: TrainedModel, seed: int) -> TrainedModel:
    """Return a model of the same architecture with newly initialized weights, as at the start of pretraining."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(model.device):
        network = type(model.network)(model.network.config, model.network.vocabulary)
    network.initialize_weights(seed)
    return TrainedModel(network.eval().requires_grad_(False), model.path, model.precision.name)


class OneHotModel(TrainedModel):
    """Represents a token by a one-hot vector over the vocabulary, and a sequence by the mean."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__(model.network, model.path, model.precision.name)

    @property
    def hidden_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.network.vocabulary.vocab_size

    def compute(
        self, sequences: Sequence[Ids], wanted: Sequence[str], limits: BatchLimits = DEFAULT_LIMITS,
        advance: Advance = no_progress,
    ) -> Iterator[OutputArrays]:  # fmt: skip
        """Compute `embeddings` and `hiddens`, see `InferenceModel`."""
        letters: Any = np.eye(self.hidden_size, dtype=np.float32)
        for part in split_batches([len(ids) for ids in sequences], limits):
            vectors = [letters[ids] for ids in sequences[part]]
            found = {"hiddens": np.concatenate(vectors), "embeddings": np.stack([each.mean(0) for each in vectors])}
            yield {name: found[name] for name in wanted}
            advance(len(vectors))
