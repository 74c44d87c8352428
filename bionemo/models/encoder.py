# SPDX-License-Identifier: Apache-2.0
"""What the masked language models share: embedding -> Megatron transformer block -> tied language-model head.

Shapes: T tokens of a pack, D hidden size, M asked positions, V vocabulary.
"""

import math
import zlib
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.config.schema import EncoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.megatron.attention import Segments, rotary_angles
from bionemo.megatron.dropout import token_keys
from bionemo.megatron.placement import placements
from bionemo.megatron.spec import EncoderBlock
from bionemo.megatron.vocabulary import VocabularyProjection, over_sequence, whole_sequence, word_table
from bionemo.tokenizers import Alphabet


class MaskedLMHead(VocabularyProjection):
    """dense -> GELU -> layer norm -> product with the word embeddings, plus a bias per word (BERT's head)."""

    def __init__(self, hidden_size: int, rows: int, words: int, epsilon: float) -> None:
        super().__init__(rows, words)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=epsilon)

    def forward(self, hidden_MD: Tensor, table_VD: Tensor) -> Tensor:
        """Return logits [M, V]: see VocabularyProjection."""
        return super().forward(self.layer_norm(F.gelu(self.dense(hidden_MD))), table_VD)


class MaskedLanguageModel(nn.Module):
    """A bidirectional encoder that names the residues hidden from it.

    Subclasses say how tokens become vectors, in `embed`.
    """

    tokenizer: ClassVar[str]  # name of its alphabet, for load_tokenizer
    rotary: ClassVar[bool] = False

    def __init__(self, config: EncoderConfig, alphabet: Alphabet) -> None:
        super().__init__()
        self.config, self.alphabet = config, alphabet
        # Megatron's names for what this process holds; see megatron/groups.py
        self.pre_process, self.post_process = groups.first_stage(), groups.last_stage()
        self.share_embeddings_and_output_weights = True
        rows = alphabet.padded_vocab_size(config.make_vocab_size_divisible_by)
        if self.pre_process or self.post_process:
            self.word_embeddings = word_table(rows, config.hidden_size)
        self.encoder = EncoderBlock(config)
        if self.post_process:
            self.lm_head = MaskedLMHead(config.hidden_size, rows, alphabet.vocab_size, config.layernorm_epsilon)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Turn tokens into vectors, [T, D]; `keys_T` are for dropout."""
        raise NotImplementedError

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Encode every token: [T, 1, D], after the final layer norm; on earlier stages what the next one needs."""
        drops = self.training and (self.config.hidden_dropout > 0 or self.config.attention_dropout > 0)
        keys_T = token_keys(batch.segment_keys, batch.segment_ids, batch.positions) if drops else None
        head_size = self.encoder.config.kv_channels
        segments = Segments(
            lengths=batch.lengths,
            boundaries=batch.boundaries,
            longest=batch.longest,
            rotary=rotary_angles(batch.positions, head_size) if self.rotary else None,
            keys=keys_T,
        )
        split = self.encoder.config.sequence_parallel
        x_T1D = None
        if self.pre_process:
            x_T1D = self.embed(batch, keys_T)[:, None, :]  # Megatron wants a batch dimension; a pack is a batch of one
            x_T1D = over_sequence(x_T1D) if split else x_T1D
        hidden_T1D: Tensor = self.encoder(x_T1D, segments)
        return whole_sequence(hidden_T1D) if split and self.post_process else hidden_T1D

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits at the asked positions only, [M, V]: the other seven in eight would cost memory for nothing.

        Stages before the last give what they have encoded, [T, 1, D].
        """
        hidden_T1D = self.hidden(batch)
        if not self.post_process:
            return hidden_T1D
        asked_MD = hidden_T1D.squeeze(1).index_select(0, batch.target_index)
        logits: Tensor = self.lm_head(asked_MD, self.word_embeddings.weight)
        return logits

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the pipeline stage before this one sent; Megatron's schedules call this before every forward."""
        self.encoder.set_input_tensor(tensors[0])

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The word table, of which the first and the last stage have a copy; Megatron adds up their gradients."""
        table = getattr(self, "word_embeddings", None)
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
                into_residual = place.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                scale = std / math.sqrt(2 * self.config.num_layers) if into_residual else std
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{place.name}".encode()))
                whole = torch.empty(place.shape, device=parameter.device).normal_(0.0, scale, generator=generator)
                parameter.copy_(place.part_of(whole, parameter))
