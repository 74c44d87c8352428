# SPDX-License-Identifier: Apache-2.0
"""Small Hugging Face ESM models and comparisons of logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EsmConfig as TheirConfig
from transformers import EsmForMaskedLM, PreTrainedModel

import bionemo

SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 3, "M", "GG?*JA"]


def theirs(path: Path, heads: int = 4, size: int = 8, layers: int = 2, **settings: Any) -> EsmForMaskedLM:
    """Save a model with random weights with transformers."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "hidden_size": heads * size, "emb_layer_norm_before":
        False, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 96, "token_dropout":
        True, "position_embedding_type": "rotary", "max_position_embeddings": 98, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    model = EsmForMaskedLM(TheirConfig(**(config | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    return model


def states(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("inv_freq")}


def check_same_logits(path: Path, model: PreTrainedModel, sequences: Sequence[str] = SEQUENCES) -> None:
    """Check that our model in `path` and theirs, with padding, have the same logits."""
    ours = bionemo.load(path)
    ids = [torch.tensor([0, *each.tolist(), 2]) for each in ours.ids(sequences)]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
    with torch.no_grad():
        logits = model(tokens, attention_mask=(tokens != 1).long()).logits
    for found, row, each in zip(ours.logits(sequences), logits, ids, strict=True):
        expected = row[1 : len(each) - 1].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
