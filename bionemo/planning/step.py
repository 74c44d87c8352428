# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a model, its numbers of parameters, and the input of a training step."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bionemo.common.errors import UserError
from bionemo.config.schema import (
    EncoderDecoderConfig,
    ESM1bConfig,
    ESM1nvConfig,
    ESM2nvConfig,
    GPT3Config,
    MegaMolBARTConfig,
    ModelConfig,
    ProtT5nvConfig,
)
from bionemo.planning.layouts import Layout, Stage
from bionemo.planning.lengths import Tokens
from bionemo.tokenizers import load_tokenizer

BlockType = Literal["encoder", "causal", "decoder"]  # as in megatron/layer_spec.py
Kernel = Literal["flash", "sequences", "probabilities", "tiles"]

BLOCK_NAMES: dict[BlockType, str] = {"encoder": "encoder", "causal": "decoder", "decoder": "decoder"}
_FAMILIES: dict[type, tuple[str, tuple[BlockType, ...]]] = {  # tokenizer and transformer blocks
    ESM1nvConfig: ("esm1nv", ("encoder",)),
    ESM1bConfig: ("esm2nv", ("encoder",)),
    ESM2nvConfig: ("esm2nv", ("encoder",)),
    GPT3Config: ("gpt2", ("causal",)),
    ProtT5nvConfig: ("prott5nv", ("encoder", "decoder")),
    MegaMolBARTConfig: ("megamolbart", ("encoder", "decoder")),
}


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model.

    Attributes:
        stacks: types of the transformer blocks, in the order in which they compute.
        layers: layers of each block, over all pipeline stages.
        hidden: hidden size.
        heads: attention heads.
        head_size: size of a head.
        ffn: hidden size of the MLP.
        vocabulary_size: vocabulary size without padding.
        table_rows: rows of the word embedding, padding included.
        positions: rows of the position embedding; 0 for rotary positions.
        position_offset: rows of the position embedding before position 0.
        embedding_norm: the embedding ends with a layer norm.
        token_dropout: embeddings are scaled by the fraction of masked tokens.
        dense: the head begins with a dense layer and a layer norm.
        tied: the head uses the word embedding.
        bias: the head has a bias for each token.
        hidden_dropout: hidden states have dropout.
        attention_dropout: attention probabilities have dropout.
    """

    stacks: tuple[BlockType, ...]
    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    vocabulary_size: int
    table_rows: int
    positions: int
    position_offset: int
    embedding_norm: bool
    token_dropout: bool
    dense: bool
    tied: bool
    bias: bool
    hidden_dropout: bool
    attention_dropout: bool

    @property
    def attention(self) -> int:
        """Total size of all heads."""
        return self.heads * self.head_size

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary."""
        return self.positions == 0


def shape_of(config: ModelConfig) -> Shape:
    """Return the dimensions of a model.

    Raises:
        UserError: if the model family is unknown or files of the vocabulary are missing.
    """
    family = next((family for config_class, family in _FAMILIES.items() if isinstance(config, config_class)), None)
    if family is None:
        known = ", ".join(config_class.__name__.removesuffix("Config").lower() for config_class in _FAMILIES)
        raise UserError(f"bionemo plan does not support {config._target_}: it supports {known}")
    tokenizer, stacks = family
    vocabulary = load_tokenizer(tokenizer, config.tokenizer)
    position_offset = vocabulary.pad_id + 1 if isinstance(config, ESM1bConfig) else 0
    tied = not isinstance(config, EncoderDecoderConfig) or config.share_decoder_tokens_head_embeddings
    return Shape(
        stacks=stacks,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.kv_channels or config.hidden_size // config.num_attention_heads,
        ffn=config.ffn_hidden_size,
        vocabulary_size=vocabulary.vocab_size,
        table_rows=vocabulary.padded_vocab_size(config.make_vocab_size_divisible_by),
        positions=0 if isinstance(config, ESM2nvConfig) else position_offset + config.max_position_embeddings,
        position_offset=position_offset,
        embedding_norm=isinstance(config, ESM1bConfig) and config.embedding_layer_norm,
        token_dropout=isinstance(config, ESM1bConfig | ESM2nvConfig) and config.embedding_token_dropout,
        dense=stacks == ("encoder",),
        tied=tied,
        bias=tied and stacks != ("causal",),
        hidden_dropout=config.hidden_dropout > 0,
        attention_dropout=config.attention_dropout > 0,
    )


def attentions_per_layer(block: BlockType) -> int:
    """Return the number of attentions of a layer: self-attention, in a decoder also cross-attention."""
    return 2 if block == "decoder" else 1


def layer_matrix_parameters(shape: Shape, block: BlockType) -> int:
    """Return the number of matrix elements of a layer: QKV (3DP) and projection (PD) of each attention, MLP (2DF)."""
    return attentions_per_layer(block) * 4 * shape.hidden * shape.attention + 2 * shape.hidden * shape.ffn


def layer_parameters(shape: Shape, block: BlockType, tensor: int = 1) -> int:
    """Return the number of parameters of a layer on one of `tensor` ranks.

    Matrices and the biases of QKV and fc1 are sharded. The other biases and the layer norms are replicated.
    """
    count = attentions_per_layer(block)
    sharded = layer_matrix_parameters(shape, block) + count * 3 * shape.attention + shape.ffn
    return sharded // tensor + (count + 1) * (1 + 2) * shape.hidden


def stage_parameters(shape: Shape, layout: Layout, stage: Stage) -> dict[str, int]:
    """Return the number of parameters of one rank of a stage, by part of the model.

    The first and the last pipeline stage both have the word embedding. The head has, depending on the model, a dense
    layer with a layer norm, a matrix of its own, and a bias.
    """
    hidden, rows = shape.hidden, shape.table_rows // layout.tensor
    head = shape.dense * (hidden * hidden + 3 * hidden) + (not shape.tied) * rows * hidden + shape.bias * rows
    return {
        "word table": rows * hidden if stage.first or stage.last else 0,
        "positions": shape.positions * hidden if stage.first else 0,
        "embedding norm": shape.embedding_norm * 2 * hidden if stage.first else 0,
        **{
            f"{BLOCK_NAMES[block]} layers": layout.layers(shape.layers) * layer_parameters(shape, block, layout.tensor)
            for block in shape.stacks
        },
        "final norms": len(shape.stacks) * 2 * hidden if stage.last else 0,
        "head": head if stage.last else 0,
    }


def model_parameters(shape: Shape) -> dict[str, int]:
    """Return the number of parameters of the whole model, by part."""
    return stage_parameters(shape, Layout(), Stage(0, 1))


class Attention(NamedTuple):
    """An attention of a layer, for one micro-batch.

    Attributes:
        queries: query tokens.
        keys: key tokens.
        pairs: pairs of tokens of the same sequence.
        unmasked_pairs: the pairs that no causal mask hides.
        max_pairs: pairs of the longest sequence.
        cross: cross-attention to the encoder's output.
    """

    queries: int
    keys: int
    pairs: float
    unmasked_pairs: float
    max_pairs: int
    cross: bool

    @property
    def causal(self) -> bool:
        """Whether a causal mask hides later tokens."""
        return self.unmasked_pairs < self.pairs


@dataclass(frozen=True)
class Stack:
    """A transformer block and its input.

    Attributes:
        block: type of the block.
        tokens: input tokens.
        source: input tokens of the encoder that a decoder attends to.
    """

    block: BlockType
    tokens: Tokens
    source: Tokens | None = None

    def attentions(self, rows: int) -> list[Attention]:
        """Return the attentions of a layer in the order in which they compute, for `rows` rows per micro-batch."""
        count, held = self.tokens.count(rows), self.tokens.held(rows)
        pairs = held * self.tokens.attended
        unmasked = pairs if self.block == "encoder" else (pairs + held) / 2
        max_length = self.tokens.max_length
        attentions = [Attention(count, count, pairs, unmasked, max_length**2, cross=False)]
        if self.source:
            pairs, max_pairs = held * self.tokens.cross_attended, max_length * self.source.max_length
            attentions.append(Attention(count, self.source.count(rows), pairs, pairs, max_pairs, cross=True))
        return attentions


@dataclass(frozen=True)
class Step:
    """Properties of a training step that determine its memory and FLOPs, apart from the layout.

    Attributes:
        shape: dimensions of the model.
        tokens: tokens of a row, for each transformer block.
        half: matrix products are in bf16 or fp16.
        deterministic: deterministic algorithms are required.
        tiles: element size in megatron/cpu_attention.py, in bytes; 0: the run uses GPUs.
    """

    shape: Shape
    tokens: tuple[Tokens, ...]
    half: bool
    deterministic: bool = False
    tiles: int = 0

    @property
    def stacks(self) -> list[Stack]:
        """The transformer blocks in the order in which they compute."""
        sources = (None, *self.tokens)  # a decoder follows its encoder
        return [Stack(*each) for each in zip(self.shape.stacks, self.tokens, sources, strict=False)]

    @property
    def tokens_per_row(self) -> float:
        """Tokens of the sequences of a row, in the first block."""
        return self.tokens[0].held(1)

    def with_largest_micro_batch(self, rows: int) -> "Step":
        """Return the step with the largest micro-batch of a run; micro-batches differ with dynamic padding."""
        return replace(self, tokens=tuple(tokens.with_largest_micro_batch(rows) for tokens in self.tokens))

    @property
    def element(self) -> int:
        """Bytes of an element between matrix products."""
        return 2 if self.half else 4

    @property
    def kernel(self) -> Kernel:
        """Attention implementation of the run, see `attend` in megatron/attention.py."""
        if self.tiles:
            return "tiles"
        if self.shape.attention_dropout:
            return "probabilities"
        return "flash" if self.half and not self.deterministic else "sequences"
