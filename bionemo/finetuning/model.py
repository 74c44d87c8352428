# SPDX-License-Identifier: Apache-2.0
"""A language model with a prediction head, of which all layers, the last layers, or LoRA adapters are trained.

Shapes: T tokens of a batch, N sequences, M their tokens without begin and end, D hidden size, R labelled rows, C
outputs, see `Head`.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bionemo.checkpoint import TensorSource
from bionemo.checkpoint.merged_lora import DOWN, UP
from bionemo.config.schema.downstream import DownstreamModelConfig, LoraConfig
from bionemo.data.batch import PackedBatch
from bionemo.finetuning import dataset, metrics
from bionemo.finetuning.heads import Head
from bionemo.finetuning.labels import is_labelled
from bionemo.megatron import lora
from bionemo.megatron.layer_spec import PackedTransformerBlock
from bionemo.megatron.sharded_state_dict import load_weights
from bionemo.megatron.sharding import parameter_shards
from bionemo.models.language_model import LanguageModel
from bionemo.models.trainable import Trainable


class FineTunedModel(Trainable):
    """An encoder with a prediction head; its parameters are `encoder.*`, including adapters, and `head.*`.

    Args:
        encoder: the language model, whose own head is not trained, and `weights` its weights.
        make_head: creates a prediction head with random weights, which `head_weights` replace.
        settings: the type of the task, and which parameters are trained besides the head.
        adapter: initial values of adapters, by names in the encoder; others are initialized to add zero.
        sample: batches of the training split for the statistics of a new head.
    """

    has_perplexity = False
    optimizer_key = "model.finetuning_optim"

    def __init__(
        self, encoder: LanguageModel, make_head: Callable[[], Head], weights: TensorSource,
        settings: DownstreamModelConfig, sample: Sequence[PackedBatch] = (),
        head_weights: Mapping[str, Tensor] | None = None, adapter: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder, self.head = encoder, make_head()
        self._make_head, self._weights, self._sample, self.task_type = (
            make_head,
            weights,
            sample,
            settings.data.task_type,
        )
        self._encoder_lr_scale, self._head_weights = settings.encoder_lr_scale, head_weights
        self.config, self.vocabulary = encoder.config, encoder.vocabulary
        self.transformer_config = encoder.transformer_config
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        self._adapter = adapter or {}
        _set_trainable(encoder, settings, self._adapter)

    @property
    def identity(self) -> dict[str, Any]:
        """Class, vocabulary and task, which are stored in checkpoints."""
        adapters = sum(name.endswith(UP) for name, _ in self.named_parameters())
        head = {name: list(parameter.shape) for name, parameter in self.head.named_parameters()}
        return super().identity | {"task": {"type": self.task_type, "head": head, "adapters": adapters}}

    def blocks(self) -> list[PackedTransformerBlock]:
        """Return the transformer blocks of the encoder."""
        return self.encoder.blocks()

    def learning_rate_factor(self, name: str) -> float:
        """See `Trainable`; the head and adapters have factor 1."""
        return 1.0 if name.startswith("head.") or name.endswith((DOWN, UP)) else self._encoder_lr_scale

    def initialize_weights(self, seed: int) -> None:
        """Load the weights of the language model and of a trained head; initialize adapters or a new head."""
        pretrained = {}
        for parameter, place in parameter_shards(self.encoder).items():
            if place.name in self._adapter:
                parameter.data.copy_(place.slice_of(self._adapter[place.name], parameter))
            elif place.name.endswith((DOWN, UP)):
                key = zlib.crc32(f"{seed}/{place.name}".encode())
                lora.initialize_lora(parameter, place, torch.Generator(parameter.device).manual_seed(key))
            else:
                pretrained[parameter] = place
        load_weights(pretrained, self._weights, to_train=True)
        if self._head_weights is not None:
            self.head.load_state_dict(self._head_weights)
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head.load_state_dict(self._make_head().state_dict())
        self._fit_statistics()

    @torch.no_grad()
    def _fit_statistics(self) -> None:
        """Set the statistics of the head from the sample, which is the same on all processes."""
        training, device = self.training, self.head.mean.device
        self.eval()
        has_bos_eos = self.encoder.has_bos_eos
        vectors = [self._vectors(batch.to(device), _lengths(batch, has_bos_eos)) for batch in self._sample]
        self.train(training)
        if vectors:
            targets = torch.cat([self._targets(batch) for batch in self._sample])
            self.head.fit_statistics(torch.cat(vectors).float().cpu().numpy(), targets.cpu().numpy())

    def _vectors(self, batch: PackedBatch, lengths: NDArray[np.int64]) -> Tensor:
        """Return the input of the head, [M, D] or [N, D]; `lengths` do not count begin and end tokens."""
        hidden_TD = self.encoder.compute_representations(batch)
        ends, sizes = int(self.encoder.has_bos_eos), np.array(batch.lengths, np.int64)
        begins = sizes.cumsum() - sizes + ends
        inner = np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(int(lengths.sum()))
        inner_MD = hidden_TD.index_select(0, torch.from_numpy(inner).to(hidden_TD.device, non_blocking=True))
        if self.head.per_token:
            return inner_MD
        counts = torch.from_numpy(lengths).to(hidden_TD.device, non_blocking=True)
        return torch.segment_reduce(inner_MD.float(), "mean", lengths=counts, unsafe=True)

    def _targets(self, batch: PackedBatch) -> Tensor:
        return dataset.get_targets(batch.target_ids, self.task_type, self.head.outputs)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the predictions [R, C] for tokens with a label, or for each sequence."""
        lengths = _lengths(batch, self.encoder.has_bos_eos)
        keys_N = batch.dropout_keys[: len(lengths)] if self.training else None
        predictions_RC: Tensor = self.head(self._vectors(batch, lengths), lengths, keys_N)
        if not self.head.per_token:
            return predictions_RC
        special = (2 * batch.segment_ids.index_select(0, batch.target_positions) + 1) * int(self.encoder.has_bos_eos)
        return predictions_RC.index_select(0, batch.target_positions - special)  # minus preceding begin and end tokens

    def compute_loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """See `Trainable`; the targets are rows with a label."""
        predictions_RC, targets = self(batch), self._targets(batch)
        count = is_labelled(targets).sum().float()
        return metrics.summed_loss(predictions_RC, targets, self.head.loss_scale), count

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Trainable`."""
        return ("accuracy",) if "classification" in self.task_type else ()

    def compute_metrics(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the accuracy in percent of a classification; see `Trainable`."""
        if not self.metric_names:
            return {}
        correct = (self(batch).argmax(1) == batch.target_ids).sum()
        return {"accuracy": torch.stack((100.0 * correct, correct.new_full((), len(batch.target_ids)))).float()}


def _lengths(batch: PackedBatch, has_bos_eos: bool) -> NDArray[np.int64]:
    """Return the number of tokens of each sequence, without begin and end tokens."""
    return np.array(batch.lengths, np.int64) - 2 * int(has_bos_eos)


def lora_ranks(settings: LoraConfig, adapter: Mapping[str, Tensor], layers: int) -> dict[str, int]:
    """Return the rank of each adapted module of a block: that of initial values, else the configured one."""
    downs = {name.partition(".")[2]: matrix for name, matrix in adapter.items() if name.endswith(DOWN)}
    targets, rank = [lora.TARGET_MODULES[each] for each in settings.target_modules], settings.adapter_dim
    names = [f"layers.{number}.{each}" for number in range(layers) for each in targets]
    return {name.removesuffix(f".{DOWN}"): len(down) for name, down in downs.items()} or dict.fromkeys(names, rank)


def _set_trainable(encoder: LanguageModel, settings: DownstreamModelConfig, adapter: Mapping[str, Tensor]) -> None:
    """Add adapters, and set which parameters are trained."""
    stack = encoder.blocks()[0]  # the encoder of an encoder-decoder
    encoder.requires_grad_(False)
    if settings.peft.enabled:
        lora.add_lora(stack, lora_ranks(settings.peft.lora_tuning, adapter, len(stack.layers)))
        return
    frozen = settings.freeze_layers
    first = frozen if frozen >= 0 else len(stack.layers) + frozen
    if first == 0:  # train the embedding, too, but not the language modeling head
        encoder.requires_grad_(True)
        encoder.lm_head.requires_grad_(False)
        for decoder in encoder.blocks()[1:]:
            decoder.requires_grad_(False)
    stack.requires_grad_(True)
    for layer in list(stack.layers)[:first]:
        layer.requires_grad_(False)
