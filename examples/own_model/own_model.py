# SPDX-License-Identifier: Apache-2.0
"""A model in a package of its own: an encoder with a convolution over the embeddings.

Shapes: T tokens of a packed batch, D hidden size, K kernel size.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, empty, nn

from bionemo.config.schema import EncoderConfig
from bionemo.config.schema.ranges import PositiveInt
from bionemo.data.batch import PackedBatch
from bionemo.formats.nemo_models import NemoModel
from bionemo.formats.weight_names import WeightNames
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.nemo_names import BERT, BERT_LAYERS
from bionemo.tokenizers import Vocabulary


@dataclass(kw_only=True)
class ConvolutionalEncoderConfig(EncoderConfig):
    """Keys of `model` in addition to those of every encoder."""

    conv_kernel: PositiveInt  # number of residues that the convolution combines
    conv_dilation: PositiveInt  # distance between these residues


class PackedConvolution(nn.Module):
    """Depthwise convolution along a packed batch; residues of other sequences count as zero."""

    def __init__(self, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.weight = nn.Parameter(empty(kernel, channels))

    def forward(self, x_TD: Tensor, segment_ids_T: Tensor) -> Tensor:
        """Return the convolved vectors, [T, D]."""
        reach = self.dilation * (len(self.weight) // 2)
        padded_x, padded_ids = F.pad(x_TD, (0, 0, reach, reach)), F.pad(segment_ids_T, (reach, reach), value=-1)
        y_TD = x_TD.new_zeros(x_TD.shape)
        for k, weight_D in enumerate(self.weight):
            window = slice(k * self.dilation, k * self.dilation + len(x_TD))
            same_sequence_T1 = (padded_ids[window] == segment_ids_T)[:, None]
            y_TD = y_TD + padded_x[window] * same_sequence_T1 * weight_D
        return y_TD


class ConvolutionalEncoder(MaskedLanguageModel):
    """A masked language model of protein sequences with a convolution before the first layer."""

    config: ConvolutionalEncoderConfig
    tokenizer = "esm2nv"
    rotary = True
    card_tag = "protein"
    nemo = NemoModel(  # optional: `.nemo` files
        nemo_class="own_model.ConvolutionalEncoder", vocab_size=33, rotary=True,
        names=WeightNames(
            {**BERT, **BERT_LAYERS, "convolution.weight": "convolution.weight"},
            shapes={"convolution.weight": ("conv_kernel", "hidden_size")},
        ),
    )  # fmt: skip

    def __init__(self, config: ConvolutionalEncoderConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        if self.pre_process:  # the first pipeline stage
            self.convolution = PackedConvolution(config.hidden_size, config.conv_kernel, config.conv_dilation)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word embeddings plus their convolution, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        return x_TD + self.convolution(x_TD, batch.segment_ids)
