# SPDX-License-Identifier: Apache-2.0
"""Base class of all models: embedding -> Megatron transformer block -> head.

Shapes: T tokens of a packed batch, D hidden size, M target positions, V vocabulary.
"""

import math
import zlib
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bionemo.checkpoint import WEIGHTS, TensorSource
from bionemo.common.errors import UserError
from bionemo.config.schema import ModelConfig
from bionemo.config.targets import import_target
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import DatasetFactory
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.nemo2 import Nemo2Model
from bionemo.formats.nemo_models import NemoModel
from bionemo.megatron import groups
from bionemo.megatron.attention import PackedSequences, rotary_cos_sin
from bionemo.megatron.dropout import EMBEDDING, dropout, token_dropout_keys
from bionemo.megatron.layer_spec import PackedTransformerBlock
from bionemo.megatron.sharding import parameter_shards
from bionemo.megatron.vocabulary import VocabularyProjection, gather_sequence, scatter_sequence, vocabulary_embedding
from bionemo.models.flops import training_flops
from bionemo.models.trainable import Trainable
from bionemo.tokenizers import TokenizerFactory, Vocabulary

_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


class LanguageModel(Trainable):
    """A single transformer block with a head that returns logits at the target positions.

    Subclasses set `tokenizer` and `dataset` and implement `build_head`. They may override `embed` or `build_layers`.
    """

    # argument of `load_tokenizer`: the name of a tokenizer, or a function that returns a vocabulary
    tokenizer: ClassVar[str | TokenizerFactory]
    dataset: ClassVar[DatasetFactory]  # class that opens the splits of the training data
    # name of a file in conf/model, which completes the configuration of a converted model; "" if there is none
    default_config: ClassVar[str] = ""
    # attend to earlier tokens only; also names the block in checkpoints: "decoder" if true, else "encoder"
    causal: ClassVar[bool] = False
    has_bos_eos: ClassVar[bool] = False  # sequences begin with a BOS token and end with an EOS token
    rotary: ClassVar[bool] = False  # use rotary instead of learned positions
    tied: ClassVar[bool] = True  # the output projection uses the word embeddings
    card_tag: ClassVar[str] = ""  # tag of model cards, such as `protein`
    # descriptions of the class in these formats; not inherited, because a subclass may compute another function
    nemo: ClassVar[NemoModel | None] = None
    nemo2: ClassVar[Nemo2Model | None] = None
    hugging_face: ClassVar[Architecture | None] = None

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        if self.rotary and config.head_size % 2:
            raise UserError(
                f"the size of an attention head is {config.head_size} (model.hidden_size={config.hidden_size}, "
                f"model.num_attention_heads={config.num_attention_heads}, model.kv_channels={config.kv_channels}): "
                "rotary positions need an even size"
            )
        self.config, self.vocabulary = config, vocabulary
        # attributes that Megatron reads; they depend on the pipeline stage of this process, see megatron/groups.py
        self.pre_process, self.post_process = groups.is_first_stage(), groups.is_last_stage()
        self.share_embeddings_and_output_weights = self.tied
        self.padded_vocab_size = vocabulary.padded_vocab_size(config.make_vocab_size_divisible_by)
        if self.pre_process or (self.post_process and self.tied):
            self.word_embeddings = vocabulary_embedding(self.padded_vocab_size, config.hidden_size)
        if self.pre_process and not self.rotary:
            self.position_embeddings = self.build_position_embeddings()
        self.build_layers()
        self.transformer_config = self.blocks()[0].config

    def build_layers(self) -> None:
        """Build the transformer block, and the head on the last pipeline stage."""
        block = PackedTransformerBlock(self.config, "causal" if self.causal else "encoder")
        self.add_module("decoder" if self.causal else "encoder", block)
        if self.post_process:
            self.lm_head = self.build_head()

    def build_position_embeddings(self) -> nn.Module:
        """Build the module that maps positions [T], counted from 0, to vectors [T, D]."""
        return nn.Embedding(self.config.max_position_embeddings, self.config.hidden_size)

    def build_head(self) -> VocabularyProjection:
        """Build the module that maps hidden states [M, D] and the word embedding weight to logits [M, V]."""
        raise NotImplementedError

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word plus position embeddings [T, D], with dropout if `keys_T` is given."""
        x_TD: Tensor = self.word_embeddings(batch.tokens) + self.position_embeddings(batch.position_ids)
        return x_TD if keys_T is None else dropout(x_TD, keys_T, EMBEDDING, self.config.hidden_dropout)

    def prepare_input(self, batch: PackedBatch) -> tuple[Tensor | None, PackedSequences]:
        """Return the input of the first layer [T, 1, D] and the sequences of the packed batch.

        With sequence parallelism the input holds the tokens of this rank only. It is None on pipeline stages after
        the first.
        """
        drops = self.training and (self.config.hidden_dropout > 0 or self.config.attention_dropout > 0)
        keys_T = token_dropout_keys(batch.dropout_keys, batch.segment_ids, batch.position_ids) if drops else None
        head_size = self.transformer_config.kv_channels
        assert head_size is not None
        frequencies = getattr(self.config, "rotary_frequencies", None)
        sequences = PackedSequences(
            lengths=batch.lengths,
            cu_seqlens=batch.cu_seqlens,
            max_length=batch.max_length,
            rotary=rotary_cos_sin(batch.position_ids, head_size, frequencies) if self.rotary else None,
            dropout_keys=keys_T,
        )
        if not self.pre_process:
            return None, sequences
        x_T1D = self.embed(batch, keys_T)[:, None, :]  # Megatron expects a batch dimension
        if self.config.compile is True or (self.config.compile and x_T1D.is_cuda):
            x_T1D = x_T1D.clone()  # the first layer would need a graph of its own for a view
        return scatter_sequence(x_T1D) if self.transformer_config.sequence_parallel else x_T1D, sequences

    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return [T, 1, D] after the final layer norm, or the block's output on earlier pipeline stages."""
        hidden_T1D: Tensor = self.blocks()[0](*self.prepare_input(batch))
        return self.gather_hidden_states(hidden_T1D)

    def compute_representations(self, batch: PackedBatch) -> Tensor:
        """Return the vector of every input token, [T, D], for embeddings and downstream tasks."""
        return self.compute_hidden_states(batch).squeeze(1)

    def gather_hidden_states(self, hidden_T1D: Tensor) -> Tensor:
        """Gather the tokens of all tensor ranks, on the last stage with sequence parallelism."""
        gather = self.transformer_config.sequence_parallel and self.post_process
        return gather_sequence(hidden_T1D) if gather else hidden_T1D

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return logits at the target positions, [M, V], or hidden states [T, 1, D] before the last stage."""
        hidden_T1D = self.compute_hidden_states(batch)
        if not self.post_process:
            return hidden_T1D
        return self.compute_logits(hidden_T1D.squeeze(1).index_select(0, batch.target_positions))

    def compute_loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """See Trainable; the loss is the cross-entropy in nats."""
        hidden_MD = self.compute_hidden_states(batch).squeeze(1).index_select(0, batch.target_positions)
        loss = self.lm_head.cross_entropy(hidden_MD, batch.target_ids, self._tied_weight())
        return loss, loss.new_full((), len(batch.target_ids))  # new_tensor would wait for a copy to the device

    def count_flops(self, batch: PackedBatch) -> float:
        """See Trainable; layers of other kinds than Megatron's are not counted."""
        source = None if batch.source is None else batch.source.lengths
        targets, entries = len(batch.target_ids), self.padded_vocab_size
        return training_flops(self.config, batch.lengths, targets, entries, causal=self.causal, source_lengths=source)

    def compute_logits(self, hidden_MD: Tensor) -> Tensor:
        """Apply the head: [M, D] -> [M, V]."""
        logits: Tensor = self.lm_head(hidden_MD, self._tied_weight())
        return logits

    def _tied_weight(self) -> Tensor | None:
        return cast(Tensor, self.word_embeddings.weight) if self.share_embeddings_and_output_weights else None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """See Trainable."""
        self.blocks()[0].set_input_tensor(tensors[0])

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the word embedding weight, whose gradients Megatron sums over the first and the last stage."""
        table: Any = getattr(self, "word_embeddings", None)
        return None if table is None else table.weight

    @torch.no_grad()
    def initialize_weights(self, seed: int) -> None:
        """Initialize weights: N(0, std), residual projections N(0, std / sqrt(2 layers)), norms 1, biases 0.

        The random numbers of a parameter depend on the seed and on its name in the whole model only, and are drawn on
        the CPU, so the model is the same for every parallel layout and device.
        """
        std = self.config.init_method_std
        for parameter, shard in parameter_shards(self).items():
            if shard.name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = shard.name.endswith(_RESIDUAL_PROJECTIONS)
                scale = std / math.sqrt(2 * self.config.num_layers) if residual else std
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{shard.name}".encode()))
                whole = torch.empty(shard.shape).normal_(0.0, scale, generator=generator)
                parameter.copy_(shard.slice_of(whole, parameter))


class MissingHead(VocabularyProjection):
    """Replaces the head of a network of which only the encoder was saved."""

    def __init__(self, path: Path) -> None:
        super().__init__(0, 0, bias=False)
        self.path = path

    def transform(self, hidden_MD: Tensor) -> Tensor:
        """Raise a UserError, see `error`."""
        raise self.error()

    def error(self) -> UserError:
        """Return the error about an output that needs the head."""
        return UserError(
            f"{self.path} holds an encoder without its language-model head: it has embeddings and can be fine-tuned; "
            "logits, losses and scores of variants need the pretrained model"
        )


def remove_missing_head(network: LanguageModel, weights: TensorSource) -> None:
    """Replace the head of a network whose saved weights contain none."""
    has_weights = any(name.startswith("lm_head.") for name, _ in network.named_parameters())
    if has_weights and not any(name.startswith("lm_head.") for name in weights.shapes(WEIGHTS)):
        network.lm_head = MissingHead(weights.path)


def load_model_class(target: str) -> type[LanguageModel]:
    """Import the model class that `model._target_` names.

    Raises:
        UserError: if there is no such class, it does not derive from LanguageModel, or it lacks an attribute.
    """
    found = import_target(target)
    if not (isinstance(found, type) and issubclass(found, LanguageModel)):
        raise UserError(f"model._target_={target} is not a model: it must derive from {LanguageModel.__name__}")
    if missing := [name for name in ("tokenizer", "dataset") if not hasattr(found, name)]:
        raise UserError(
            f"model._target_={target} lacks the attribute {missing[0]}: see CONTRIBUTING.md, 'Add a model'"
        )
    return found
