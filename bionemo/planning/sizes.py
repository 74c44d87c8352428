# SPDX-License-Identifier: Apache-2.0
"""Numbers of parameters by formula: of a model, and of what one process holds of it."""

from dataclasses import dataclass

from bionemo.config.schema import ESM1nvConfig, ESM2nvConfig, ModelConfig
from bionemo.errors import UserError
from bionemo.planning.layout import Layout, Stage
from bionemo.tokenizers import load_tokenizer

# The alphabet and the positions of each kind of model; models/*.py say the same with torch.
_ALPHABETS: dict[type, str] = {ESM1nvConfig: "esm1nv", ESM2nvConfig: "esm2nv"}


@dataclass(frozen=True)
class Shape:
    """The dimensions of an encoder.

    Attributes:
        layers: of the whole model.
        hidden: size of the residual stream.
        heads: of attention, of the whole model.
        head_size: size of each.
        ffn: size between the two products of the MLP.
        words: in the alphabet.
        rows: of the word table, padding included.
        positions: rows of the position table; 0: positions are rotary.
        hidden_dropout: whether activations are dropped.
        attention_dropout: whether attention probabilities are.
    """

    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    words: int
    rows: int
    positions: int
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
        UserError: for a model that there is no formula for.
    """
    name = next((name for kind, name in _ALPHABETS.items() if isinstance(config, kind)), None)
    if name is None:
        raise UserError(f"there is no plan for {config._target_}: only {', '.join(_ALPHABETS.values())} are known")
    alphabet = load_tokenizer(name)
    return Shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_size=config.kv_channels or config.hidden_size // config.num_attention_heads,
        ffn=config.ffn_hidden_size,
        words=alphabet.vocab_size,
        rows=alphabet.padded_vocab_size(config.make_vocab_size_divisible_by),
        positions=config.max_position_embeddings if isinstance(config, ESM1nvConfig) else 0,
        hidden_dropout=config.hidden_dropout > 0,
        attention_dropout=config.attention_dropout > 0,
    )


def layer_matrices(shape: Shape) -> int:
    """Weights of a layer that tokens are multiplied with: qkv 3DP, proj PD, fc1 DF, fc2 FD; P: all heads together."""
    return 4 * shape.hidden * shape.attention + 2 * shape.hidden * shape.ffn


def layer_parameters(shape: Shape, tensor: int = 1) -> int:
    """Parameters of a layer on each of its tensor ranks.

    Matrices and the biases of qkv and fc1 are divided; the biases of proj and fc2, which are added to the sum over the
    ranks, and two layer norms of weight and bias are on every rank.
    """
    divided = layer_matrices(shape) + 3 * shape.attention + shape.ffn
    return divided // tensor + 2 * shape.hidden + 4 * shape.hidden


def stage_parameters(shape: Shape, layout: Layout, stage: Stage) -> dict[str, int]:
    """Parameters that one process holds, by part.

    The word table is divided by rows; with a pipeline, first and last stage have a copy each. The head is a dense
    layer with bias, a layer norm, and a bias for each row of the table.
    """
    d, tensor = shape.hidden, layout.tensor
    ends = stage.first or stage.last
    return {
        "word table": shape.rows * d // tensor if ends else 0,
        "positions": shape.positions * d if stage.first else 0,
        "layers": layout.layers(shape.layers) * layer_parameters(shape, tensor),
        "final norm": 2 * d if stage.last else 0,
        "head": d * d + d + 2 * d + shape.rows // tensor if stage.last else 0,
    }


def model_parameters(shape: Shape) -> dict[str, int]:
    """Parameters of the whole model, by part: what a single process would hold."""
    return stage_parameters(shape, Layout(), Stage(0, 1))
