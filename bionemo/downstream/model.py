# SPDX-License-Identifier: Apache-2.0
"""A language model with a task's head on it, of which everything, the last layers, or adapters and the head learn.

Shapes: T tokens of a pack, N sequences, M their tokens without begin and end, D hidden size, R asked rows, C classes.
"""

import zlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bionemo.checkpoint import TensorSource
from bionemo.checkpoint.within import DOWN, UP
from bionemo.data.batch import PackedBatch
from bionemo.downstream import labelled, metrics
from bionemo.downstream.heads import Head
from bionemo.downstream.task import Kind
from bionemo.megatron import lora
from bionemo.megatron.placement import placements
from bionemo.megatron.spec import Block
from bionemo.megatron.state import load_weights
from bionemo.models.language_model import LanguageModel
from bionemo.models.trainable import Trainable


class Tuning(NamedTuple):
    """What learns besides the head.

    Attributes:
        freeze_layers: this many of the first layers stay, and the embedding; a negative number: all but the last.
        adapter_rank: of low-rank adapters, beside which all else stays; None: there are none.
        adapted: what has adapters, of lora.MODULES.
    """

    freeze_layers: int = 0
    adapter_rank: int | None = None
    adapted: Collection[str] = ("attention_qkv",)


class FineTuned(Trainable):
    """Takes the place of a language model in training; its parameters are `encoder.*`, with adapters, and `head.*`.

    Args:
        encoder: the language model, of which what says words stays.
        make_head: draws a head.
        weights: of the language model.
        kind: of the task.
        tuning: what learns.
    """

    perplexity = False

    def __init__(
        self, encoder: LanguageModel, make_head: Callable[[], Head], weights: TensorSource, kind: Kind, tuning: Tuning
    ) -> None:
        super().__init__()
        self.encoder, self.head = encoder, make_head()
        self._make_head, self._weights, self.kind = make_head, weights, kind
        self.config, self.vocabulary = encoder.config, encoder.vocabulary
        self.transformer_config = encoder.transformer_config
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        _choose(encoder, tuning)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        adapters = sum(name.endswith(UP) for name, _ in self.named_parameters())
        head = {name: list(parameter.shape) for name, parameter in self.head.named_parameters()}
        return super().identity | {"task": {"type": self.kind, "head": head, "adapters": adapters}}

    def blocks(self) -> list[Block]:
        """Stacks of layers."""
        return self.encoder.blocks()

    def initialise(self, seed: int) -> None:
        """Take the language model's weights, and draw those of the head and of adapters."""
        own = {}
        for parameter, place in placements(self.encoder).items():
            if place.name.endswith((DOWN, UP)):
                key = zlib.crc32(f"{seed}/{place.name}".encode())
                lora.initialise(parameter, place, torch.Generator(parameter.device).manual_seed(key))
            else:
                own[parameter] = place
        load_weights(own, self._weights)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head.load_state_dict(self._make_head().state_dict())

    def forward(self, batch: PackedBatch) -> Tensor:
        """What the head says where it is asked, [R, C]: of tokens that have a label, or of each sequence."""
        hidden_TD = self.encoder.represent(batch)
        ends = int(self.encoder.ends)
        sizes = np.array(batch.lengths, np.int64)
        lengths = sizes - 2 * ends
        begins = sizes.cumsum() - sizes + ends
        inside = np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(int(lengths.sum()))
        inside_MD = hidden_TD.index_select(0, torch.from_numpy(inside).to(hidden_TD.device, non_blocking=True))
        keys_N = batch.segment_keys[: len(sizes)] if self.training else None
        if not self.head.per_token:
            counts = torch.from_numpy(lengths).to(hidden_TD.device, non_blocking=True)
            pooled_ND = torch.segment_reduce(inside_MD.float(), "mean", lengths=counts, unsafe=True)
            answers_RC: Tensor = self.head(pooled_ND, lengths, keys_N)
            return answers_RC
        said_MC = self.head(inside_MD, lengths, keys_N)
        before = (2 * batch.segment_ids.index_select(0, batch.target_index) + 1) * ends  # begins and ends so far
        answers_RC = said_MC.index_select(0, batch.target_index - before)
        return answers_RC

    def evaluate(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The share of right answers in percent, of classes; see Trainable."""
        if self.kind == "regression":
            return {}
        right = (self(batch).argmax(1) == batch.target_ids).sum()
        return {"accuracy": torch.stack((100.0 * right, right.new_tensor(len(batch.target_ids)))).float()}


def objective(answers_RC: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Loss summed over the asked rows, and their number; one column says a number, more say classes."""
    targets_R = labelled.targets_of(batch, "regression" if answers_RC.shape[1] == 1 else "classification")
    return metrics.summed_loss(answers_RC, targets_R), answers_RC.new_tensor(len(targets_R), dtype=torch.float32)


def _choose(encoder: LanguageModel, tuning: Tuning) -> None:
    """Say which parameters learn, and make adapters."""
    stack = encoder.blocks()[0]  # of an encoder-decoder the encoder
    encoder.requires_grad_(False)
    if tuning.adapter_rank is not None:
        lora.adapt(stack, tuning.adapter_rank, tuning.adapted)
        return
    first = tuning.freeze_layers if tuning.freeze_layers >= 0 else len(stack.layers) + tuning.freeze_layers
    if first == 0:  # then what turns tokens into vectors, too; not what says words
        encoder.requires_grad_(True)
        encoder.lm_head.requires_grad_(False)
        for decoder in encoder.blocks()[1:]:
            decoder.requires_grad_(False)
    stack.requires_grad_(True)
    for layer in list(stack.layers)[:first]:
        layer.requires_grad_(False)
