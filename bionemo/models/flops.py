# SPDX-License-Identifier: Apache-2.0
"""Useful FLOPs of a training step, without padding and recomputation, for the model FLOPs utilization (MFU)."""

from collections.abc import Sequence

from bionemo.config.schema import ModelConfig


def training_flops(
    config: ModelConfig,
    lengths: Sequence[int],
    targets: int,
    entries: int,
    *,
    causal: bool = False,
    source_lengths: Sequence[int] | None = None,
) -> float:
    """Return the FLOPs of the matrix products of forward and backward pass (Chowdhery et al. 2022, appendix B).

    6 per weight and token, and 12 per layer, channel and pair of a query and a key in the same sequence. Transformer
    layers and the output projection are counted.

    Args:
        config: configuration of the model.
        lengths: tokens of each sequence; of an encoder-decoder, of the decoder.
        targets: number of target positions, at which the output projection is computed.
        entries: size of the vocabulary.
        causal: each token attends to itself and earlier ones, so half of the pairs count.
        source_lengths: tokens of each sequence of the encoder of an encoder-decoder.
    """
    size, channels = config.hidden_size, config.num_attention_heads * config.head_size
    tokens, pairs = sum(lengths), float(sum(n * n for n in lengths))
    projections = 2 * size * channels  # weights of queries and output, or of keys and values
    matrices = 3 if config.activation == "swiglu" else 2  # of a feed-forward layer
    layer = 2 * projections + matrices * size * config.ffn_hidden_size
    weights = layer * tokens
    if causal or source_lengths is not None:
        pairs /= 2
    if source_lengths is not None:
        source_tokens = sum(source_lengths)
        weights += layer * source_tokens + projections * (tokens + source_tokens)
        pairs += sum(n * n for n in source_lengths)
        pairs += sum(n * m for n, m in zip(lengths, source_lengths, strict=True))
    return 6.0 * (config.num_layers * weights + targets * size * entries) + 12.0 * config.num_layers * channels * pairs
