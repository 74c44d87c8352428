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
from bionemo.megatron.attention import Segments, rotary_angles
from bionemo.megatron.spec import encoder_block
from bionemo.tokenizers import Alphabet


class MaskedLMHead(nn.Module):
    """dense -> GELU -> layer norm -> product with the word embeddings, plus a bias per word (BERT's head)."""

    def __init__(self, hidden_size: int, padded_vocab_size: int, epsilon: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=epsilon)
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size))

    def forward(self, hidden_MD: Tensor, words_VD: Tensor) -> Tensor:
        """Return logits [M, V] for the V words given: the rows that only pad the table are never an answer."""
        x_MD = self.layer_norm(F.gelu(self.dense(hidden_MD)))
        return F.linear(x_MD, words_VD, self.bias[: len(words_VD)])


class MaskedLanguageModel(nn.Module):
    """A bidirectional encoder that names the residues hidden from it.

    Subclasses say how tokens become vectors, in `embed`.
    """

    tokenizer: ClassVar[str]  # name of its alphabet, for load_tokenizer
    rotary: ClassVar[bool] = False

    def __init__(self, config: EncoderConfig, alphabet: Alphabet) -> None:
        super().__init__()
        self.config, self.alphabet = config, alphabet
        padded = alphabet.padded_vocab_size(config.make_vocab_size_divisible_by)
        self.word_embeddings = nn.Embedding(padded, config.hidden_size)
        self.encoder = encoder_block(config)
        self.lm_head = MaskedLMHead(config.hidden_size, padded, config.layernorm_epsilon)

    def embed(self, batch: PackedBatch) -> Tensor:
        """Turn tokens into vectors, [T, D]."""
        raise NotImplementedError

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Encode every token: [T, D], after the final layer norm."""
        head_size = self.encoder.config.kv_channels
        segments = Segments(
            lengths=batch.lengths,
            boundaries=batch.boundaries,
            longest=batch.longest,
            rotary=rotary_angles(batch.positions, head_size) if self.rotary else None,
        )
        x_T1D = self.embed(batch)[:, None, :]  # Megatron wants a batch dimension; a pack is a batch of one
        return self.encoder(x_T1D, attention_mask=None, packed_seq_params=segments).squeeze(1)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits at the asked positions only, [M, V]: the other seven in eight would cost memory for nothing."""
        asked_MD = self.hidden(batch).index_select(0, batch.target_index)
        return self.lm_head(asked_MD, self.word_embeddings.weight[: self.alphabet.vocab_size])

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the pipeline stage before this one sent; Megatron's schedules call this before every forward."""
        self.encoder.set_input_tensor(tensors[0])

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights: N(0, std), output projections N(0, std / sqrt(2 layers)), norms 1, biases 0.

        Every parameter has a stream of its own, keyed by its name, so a layout that holds only some of them draws
        the same values.
        """
        std = self.config.init_method_std
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                scale = std / math.sqrt(2 * self.config.num_layers) if into_residual else std
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                parameter.normal_(0.0, scale, generator=generator)
