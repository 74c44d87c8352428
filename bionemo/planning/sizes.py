# SPDX-License-Identifier: Apache-2.0
"""Numbers of parameters by formula: of a model, and of what one process holds of it."""

from dataclasses import dataclass
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
from bionemo.planning.layout import Layout, Stage
from bionemo.tokenizers import load_tokenizer

Kind = Literal["encoder", "causal", "decoder"]  # of a stack of layers, as in megatron/spec.py

NAMES: dict[Kind, str] = {"encoder": "encoder", "causal": "decoder", "decoder": "decoder"}  # as users know them


class Family(NamedTuple):
    """What all models of a class have in common; models/*.py say the same with torch."""

    vocabulary: str
    stacks: tuple[Kind, ...]


_FAMILIES: dict[type, Family] = {
    ESM1nvConfig: Family("esm1nv", ("encoder",)),
    ESM1bConfig: Family("esm2nv", ("encoder",)),
    ESM2nvConfig: Family("esm2nv", ("encoder",)),
    GPT3Config: Family("gpt2", ("causal",)),
    ProtT5nvConfig: Family("prott5nv", ("encoder", "decoder")),
    MegaMolBARTConfig: Family("megamolbart", ("encoder", "decoder")),
}


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model.

    Attributes:
        stacks: of layers, in the order in which they compute.
        layers: of each stack, over all stages.
        hidden: size of the residual stream.
        heads: of attention, of the whole model.
        head_size: size of each.
        ffn: size between the two products of the MLP.
        words: in the vocabulary.
        rows: of the word table, padding included.
        positions: rows of the position table; 0: positions are rotary.
        before: rows of it that are of no position.
        normed: whether the embedding ends with a norm.
        token_dropout: whether it is scaled by the share of tokens that are not masked.
        dense: whether the head begins with a dense layer and a norm.
        tied: whether the head's table is that of the embedding.
        bias: whether the head has one for each word.
        hidden_dropout: whether activations are dropped.
        attention_dropout: whether attention probabilities are.
    """

    stacks: tuple[Kind, ...]
    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    words: int
    rows: int
    positions: int
    before: int
    normed: bool
    token_dropout: bool
    dense: bool
    tied: bool
    bias: bool
    hidden_dropout: bool
    attention_dropout: bool

    @property
    def attention(self) -> int:
        """Size of all heads together."""
        return self.heads * self.head_size

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned by their positions."""
        return self.positions == 0


def shape_of(config: ModelConfig) -> Shape:
    """Read the dimensions off a configuration.

    Raises:
        UserError: for a model that there is no formula for, or a vocabulary whose files are missing.
    """
    family = next((family for kind, family in _FAMILIES.items() if isinstance(config, kind)), None)
    if family is None:
        known = ", ".join(kind.__name__.removesuffix("Config").lower() for kind in _FAMILIES)
        raise UserError(f"there is no plan for {config._target_}: only {known} are known")
    vocabulary = load_tokenizer(family.vocabulary, config.tokenizer)
    before = vocabulary.pad_id + 1 if isinstance(config, ESM1bConfig) else 0
    tied = not isinstance(config, EncoderDecoderConfig) or config.share_decoder_tokens_head_embeddings
    return Shape(
        stacks=family.stacks,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.kv_channels or config.hidden_size // config.num_attention_heads,
        ffn=config.ffn_hidden_size,
        words=vocabulary.vocab_size,
        rows=vocabulary.padded_vocab_size(config.make_vocab_size_divisible_by),
        positions=0 if isinstance(config, ESM2nvConfig) else before + config.max_position_embeddings,
        before=before,
        normed=isinstance(config, ESM1bConfig) and config.embedding_layer_norm,
        token_dropout=isinstance(config, ESM1bConfig | ESM2nvConfig) and config.embedding_token_dropout,
        dense=family.stacks == ("encoder",),
        tied=tied,
        bias=tied and family.stacks != ("causal",),
        hidden_dropout=config.hidden_dropout > 0,
        attention_dropout=config.attention_dropout > 0,
    )


def attentions(kind: Kind) -> int:
    """Attentions in a layer: to its own tokens, in a decoder to the encoder's as well."""
    return 2 if kind == "decoder" else 1


def layer_matrices(shape: Shape, kind: Kind) -> int:
    """Weights of a layer that tokens are multiplied with.

    Queries, keys, values 3DP and proj PD of each attention, fc1 DF, fc2 FD; P: all heads together.
    """
    return attentions(kind) * 4 * shape.hidden * shape.attention + 2 * shape.hidden * shape.ffn


def layer_parameters(shape: Shape, kind: Kind, tensor: int = 1) -> int:
    """Parameters of a layer on each of its tensor ranks.

    Matrices and the biases of queries, keys, values and fc1 are divided; the biases of proj and fc2, which are added
    to the sum over the ranks, and layer norms of weight and bias are on every rank.
    """
    count = attentions(kind)
    divided = layer_matrices(shape, kind) + count * 3 * shape.attention + shape.ffn
    return divided // tensor + (count + 1) * (1 + 2) * shape.hidden


def stage_parameters(shape: Shape, layout: Layout, stage: Stage) -> dict[str, int]:
    """Parameters that one process holds, by part.

    The word table is divided by rows; with a pipeline, first and last stage have a copy each. The head is, as the
    model has them, a dense layer with bias and a layer norm, a table of its own, and a bias for each row of the table.
    """
    d, rows = shape.hidden, shape.rows // layout.tensor
    ends = stage.first or stage.last
    head = shape.dense * (d * d + d + 2 * d) + (not shape.tied) * rows * d + shape.bias * rows
    return {
        "word table": rows * d if ends else 0,
        "positions": shape.positions * d if stage.first else 0,
        "embedding norm": shape.normed * 2 * d if stage.first else 0,
        **{
            f"{NAMES[kind]} layers": layout.layers(shape.layers) * layer_parameters(shape, kind, layout.tensor)
            for kind in shape.stacks
        },
        "final norms": len(shape.stacks) * 2 * d if stage.last else 0,
        "head": head if stage.last else 0,
    }


def model_parameters(shape: Shape) -> dict[str, int]:
    """Parameters of the whole model, by part: what a single process would hold."""
    return stage_parameters(shape, Layout(), Stage(0, 1))
