# SPDX-License-Identifier: Apache-2.0
"""A language model with a task's head on it, of which everything, the last layers, or adapters and the head learn.

Shapes: T tokens of a pack, N sequences, M their tokens without begin and end, D hidden size, R asked rows, C classes.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bionemo.checkpoint import TensorSource
from bionemo.checkpoint.merged_lora import DOWN, UP
from bionemo.data.batch import PackedBatch
from bionemo.finetuning import dataset, metrics
from bionemo.finetuning.heads import Head
from bionemo.finetuning.task import Kind
from bionemo.megatron import lora
from bionemo.megatron.layer_spec import Block
from bionemo.megatron.sharded_state_dict import load_weights
from bionemo.megatron.sharding import placements
from bionemo.models.language_model import LanguageModel
from bionemo.models.trainable import Trainable


class Tuning(NamedTuple):
    """What learns besides the head.

    Attributes:
        freeze_layers: this many of the first layers stay, and the embedding; a negative number: all but the last.
        adapter_rank: of low-rank adapters, beside which all else stays; None: there are none.
        adapted: what has adapters, of lora.MODULES.
        encoder_rate: learning rate of the language model's own weights, as a multiple of the head's.
    """

    freeze_layers: int = 0
    adapter_rank: int | None = None
    adapted: Collection[str] = ("attention_qkv",)
    encoder_rate: float = 1.0


class FineTuned(Trainable):
    """Takes the place of a language model in training; its parameters are `encoder.*`, with adapters, and `head.*`.

    Args:
        encoder: the language model, of which what says words stays.
        make_head: draws a head.
        weights: of the language model.
        kind: of the task.
        tuning: what learns.
        sample: sequences of the training split, on which a new head sees what vectors are like.
        head_weights: of a trained head, to begin with; None: a new one is drawn.
    """

    perplexity = False
    optim_key = "model.finetuning_optim"

    def __init__(
        self, encoder: LanguageModel, make_head: Callable[[], Head], weights: TensorSource, kind: Kind, tuning: Tuning,
        sample: Sequence[PackedBatch] = (), head_weights: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder, self.head = encoder, make_head()
        self._make_head, self._weights, self._sample, self.kind = make_head, weights, sample, kind
        self._encoder_rate, self._head_weights = tuning.encoder_rate, head_weights
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

    def rate_of(self, name: str) -> float:
        """See Trainable; what is drawn here learns at the run's own."""
        return 1.0 if name.startswith("head.") or name.endswith((DOWN, UP)) else self._encoder_rate

    def initialise(self, seed: int) -> None:
        """Take the language model's weights and a trained head's, and draw what is new: adapters, or the head."""
        own = {}
        for parameter, place in placements(self.encoder).items():
            if place.name.endswith((DOWN, UP)):
                key = zlib.crc32(f"{seed}/{place.name}".encode())
                lora.initialise(parameter, place, torch.Generator(parameter.device).manual_seed(key))
            else:
                own[parameter] = place
        load_weights(own, self._weights, to_train=True)
        if self._head_weights is not None:
            self.head.load_state_dict(self._head_weights)
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head.load_state_dict(self._make_head().state_dict())
        self._standardise()

    @torch.no_grad()
    def _standardise(self) -> None:
        """Tell the head what vectors are like before anything is learned: on every process the same."""
        training, device = self.training, self.head.mean.device
        self.eval()
        read = [self._vectors(batch.to(device), _lengths(batch, self.encoder.ends)) for batch in self._sample]
        self.train(training)
        if read:
            targets = torch.cat([dataset.targets_of(batch, self.kind) for batch in self._sample])
            self.head.standardise(torch.cat(read).float().cpu().numpy(), targets.cpu().numpy())

    def _vectors(self, batch: PackedBatch, lengths: NDArray[np.int64]) -> Tensor:
        """What the head reads, [M, D] or [N, D]; `lengths` are those of the sequences without begin and end."""
        hidden_TD = self.encoder.represent(batch)
        ends, sizes = int(self.encoder.ends), np.array(batch.lengths, np.int64)
        begins = sizes.cumsum() - sizes + ends
        inside = np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(int(lengths.sum()))
        inside_MD = hidden_TD.index_select(0, torch.from_numpy(inside).to(hidden_TD.device, non_blocking=True))
        if self.head.per_token:
            return inside_MD
        counts = torch.from_numpy(lengths).to(hidden_TD.device, non_blocking=True)
        return torch.segment_reduce(inside_MD.float(), "mean", lengths=counts, unsafe=True)

    def forward(self, batch: PackedBatch) -> Tensor:
        """What the head says where it is asked, [R, C]: of tokens that have a label, or of each sequence."""
        lengths = _lengths(batch, self.encoder.ends)
        keys_N = batch.segment_keys[: len(lengths)] if self.training else None
        said_RC: Tensor = self.head(self._vectors(batch, lengths), lengths, keys_N)
        if not self.head.per_token:
            return said_RC
        before = (2 * batch.segment_ids.index_select(0, batch.target_index) + 1) * int(self.encoder.ends)
        return said_RC.index_select(0, batch.target_index - before)  # less the begins and ends so far

    @property
    def measures(self) -> tuple[str, ...]:
        """See Trainable."""
        return () if self.kind == "regression" else ("accuracy",)

    def evaluate(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The share of right answers in percent, of classes; see Trainable."""
        if self.kind == "regression":
            return {}
        right = (self(batch).argmax(1) == batch.target_ids).sum()
        return {"accuracy": torch.stack((100.0 * right, right.new_tensor(len(batch.target_ids)))).float()}


def _lengths(batch: PackedBatch, ends: bool) -> NDArray[np.int64]:
    """Tokens of each sequence, without begin and end."""
    return np.array(batch.lengths, np.int64) - 2 * int(ends)


def objective(answers_RC: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Loss summed over the asked rows, and their number; one column says a number, more say classes."""
    targets_R = dataset.targets_of(batch, "regression" if answers_RC.shape[1] == 1 else "classification")
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
