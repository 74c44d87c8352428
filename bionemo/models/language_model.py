# SPDX-License-Identifier: Apache-2.0
"""What all of the models share: embedding -> Megatron transformer block -> head.

Shapes: T tokens of a pack, D hidden size, M asked positions, V vocabulary.
"""

import math
import zlib
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bionemo.config.schema import ModelConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import KindOfSamples
from bionemo.megatron import groups
from bionemo.megatron.attention import Segments, rotary_angles
from bionemo.megatron.dropout import EMBEDDING, dropout, token_keys
from bionemo.megatron.layer_spec import Block, Kind
from bionemo.megatron.sharding import placements
from bionemo.megatron.vocabulary import over_sequence, whole_sequence, word_table
from bionemo.models.trainable import Trainable
from bionemo.tokenizers import Vocabulary

_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


class LanguageModel(Trainable):
    """One stack of layers that says something of the tokens it has read.

    Subclasses name their vocabulary and their data, and make a head; where they differ in more, they override
    `embed`, or what makes the stack.
    """

    tokenizer: ClassVar[str]  # name of its vocabulary, for load_tokenizer
    samples: ClassVar[KindOfSamples]  # kind of its data
    stack: ClassVar[str]  # what the block of layers is called, in checkpoints too
    kind: ClassVar[Kind]
    base: ClassVar[str]  # one of its sizes in conf/model
    ends: ClassVar[bool] = False  # what it reads begins and ends with a token of its own
    rotary: ClassVar[bool] = False  # positions turn queries and keys instead of being learned

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        # Megatron's names for what this process holds; see megatron/groups.py
        self.pre_process, self.post_process = groups.first_stage(), groups.last_stage()
        self.share_embeddings_and_output_weights = True
        self.rows = vocabulary.padded_vocab_size(config.make_vocab_size_divisible_by)
        if self.pre_process or self.post_process:
            self.word_embeddings = word_table(self.rows, config.hidden_size)
        if self.pre_process and not self.rotary:
            self.position_embeddings = self.make_positions()
        self.add_stacks()
        self.transformer_config = self.blocks()[0].config

    def add_stacks(self) -> None:
        """Make the layers, and on the last stage the head."""
        self.add_module(self.stack, Block(self.config, self.kind))
        if self.post_process:
            self.lm_head = self.make_head()

    def make_positions(self) -> nn.Module:
        """Make what turns numbers of positions [T], from 0 on, into learned vectors [T, D]."""
        return nn.Embedding(self.config.max_position_embeddings, self.config.hidden_size)

    def make_head(self) -> nn.Module:
        """Make what turns vectors [M, D] and the word table into logits [M, V]."""
        raise NotImplementedError

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Turn tokens into vectors, [T, D]: word plus position; `keys_T` are for dropout."""
        x_TD: Tensor = self.word_embeddings(batch.tokens) + self.position_embeddings(batch.positions)
        return x_TD if keys_T is None else dropout(x_TD, keys_T, EMBEDDING, self.config.hidden_dropout)

    def read(self, batch: PackedBatch) -> tuple[Tensor | None, Segments]:
        """What the first layer is given: vectors [T, 1, D], this rank's stretch of them, and where sequences lie.

        Stages after the first get their vectors from the one before.
        """
        drops = self.training and (self.config.hidden_dropout > 0 or self.config.attention_dropout > 0)
        keys_T = token_keys(batch.segment_keys, batch.segment_ids, batch.positions) if drops else None
        head_size = self.transformer_config.kv_channels
        assert head_size is not None
        segments = Segments(
            lengths=batch.lengths,
            boundaries=batch.boundaries,
            longest=batch.longest,
            rotary=rotary_angles(batch.positions, head_size) if self.rotary else None,
            keys=keys_T,
        )
        if not self.pre_process:
            return None, segments
        x_T1D = self.embed(batch, keys_T)[:, None, :]  # Megatron wants a batch dimension; a pack is a batch of one
        return over_sequence(x_T1D) if self.transformer_config.sequence_parallel else x_T1D, segments

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Vectors of every token, [T, 1, D], after the final layer norm; on earlier stages what the next one needs."""
        hidden_T1D: Tensor = self.blocks()[0](*self.read(batch))
        return self.gathered(hidden_T1D)

    def represent(self, batch: PackedBatch) -> Tensor:
        """Vectors of every token that it reads, [T, D]: what its use for other tasks begins with."""
        return self.hidden(batch).squeeze(1)

    def gathered(self, hidden_T1D: Tensor) -> Tensor:
        """All tokens again, where the last stage has them divided over tensor ranks."""
        return (
            whole_sequence(hidden_T1D)
            if self.transformer_config.sequence_parallel and self.post_process
            else hidden_T1D
        )

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits at the asked positions only, [M, V]: of a masked sequence the others would cost memory for nothing.

        Stages before the last give what they have computed, [T, 1, D].
        """
        hidden_T1D = self.hidden(batch)
        if not self.post_process:
            return hidden_T1D
        asked_MD = hidden_T1D.squeeze(1).index_select(0, batch.target_index)
        return self.logits(asked_MD)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """What the head makes of vectors: [M, V]."""
        logits: Tensor = self.lm_head(hidden_MD, self.word_embeddings.weight)
        return logits

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """See Trainable."""
        self.blocks()[0].set_input_tensor(tensors[0])

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The word table, of which the first and the last stage have a copy; Megatron adds up their gradients."""
        table: Any = getattr(self, "word_embeddings", None)
        return None if table is None else table.weight

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights: N(0, std), output projections N(0, std / sqrt(2 layers)), norms 1, biases 0.

        Every parameter has a stream of its own, keyed by its name in the whole model, of which a process that holds a
        part takes that part: the model is the same for every layout.
        """
        std = self.config.init_method_std
        for parameter, place in placements(self).items():
            if place.name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                into_residual = place.name.endswith(_INTO_RESIDUAL)
                scale = std / math.sqrt(2 * self.config.num_layers) if into_residual else std
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{place.name}".encode()))
                whole = torch.empty(place.shape, device=parameter.device).normal_(0.0, scale, generator=generator)
                parameter.copy_(place.part_of(whole, parameter))
