# SPDX-License-Identifier: Apache-2.0
"""Our models against independent ones with the same random weights: logits and gradients, packed and padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bionemo.config.compose import load
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.masking import Masking
from bionemo.data.mock import MockSource
from bionemo.data.packing import pack, pad
from bionemo.models.build import model_class
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers import load_tokenizer

from ..conftest import EXAMPLES
from .reference import TorchBert, hf_esm2, to_hf, to_torch_bert

SMALL = ["model.num_layers=3", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=256",
         "model.seq_length=96", "model.hidden_dropout=0.0", "model.attention_dropout=0.0"]  # fmt: skip
CONFIGS = {"esm1nv": "pretrain_small", "esm2nv": "pretrain_esm2_8M"}


def ours(name: str) -> MaskedLanguageModel:
    cfg = load(CONFIGS[name], SMALL, EXAMPLES / name / "conf")
    model = model_class(cfg.model._target_)(cfg.model, load_tokenizer(name))
    model.initialise(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases and norms too must differ from their initial values to be told apart
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch_of(model: MaskedLanguageModel, plan: object) -> PackedBatch:
    """Six masked sequences of 10 to 94 residues, packed or one a row; every real token is asked for."""
    alphabet, length = model.alphabet, model.config.seq_length
    source = MockSource(6, 10, length - 2, seed=3, split="train")
    rows = plan(source.lengths.astype(np.int64) + 2, length, 5)
    masking = Masking(alphabet, 0.15, 0.8, 0.1)
    collate = Collator(source, alphabet, masking, seed=4, seq_length=length, rows=len(rows), crop=False)
    batch = collate([(np.zeros_like(row), row) for row in rows])
    everywhere = torch.arange(batch.num_tokens)
    answers = torch.randint(4, 20, (batch.num_tokens,), generator=torch.Generator().manual_seed(6))
    return replace(batch, target_index=everywhere, target_ids=answers)


def as_rows(batch: PackedBatch, pad_id: int) -> tuple[Tensor, Tensor]:
    """The same sequences as a padded batch, and where it is padding: what the reference models read."""
    pieces = batch.tokens[: batch.num_tokens].long().split(batch.lengths)
    tokens = torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True, padding_value=pad_id)
    lengths = torch.tensor(batch.lengths)
    return tokens, torch.arange(tokens.shape[1]) >= lengths[:, None]


def close(found: Tensor, expected: Tensor) -> None:
    """Equal within 1e-5 of the largest value."""
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error < 1e-5, float(error)


@pytest.mark.parametrize("plan", [pack, pad])
@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_logits_and_gradients_equal_the_reference(name: str, plan: object) -> None:
    model = ours(name).train()
    config, alphabet = model.config, model.alphabet
    rename = {"esm1nv": to_torch_bert, "esm2nv": to_hf}[name]
    shape = (config.num_layers, config.num_attention_heads, alphabet.vocab_size)
    weights = rename({k: v.detach().clone() for k, v in model.named_parameters()}, *shape)
    if name == "esm1nv":
        reference = TorchBert(config, alphabet.vocab_size)
        reference.load_state_dict(weights)
    else:
        reference = hf_esm2(config, alphabet.vocab_size, alphabet.mask_id, alphabet.pad_id)
        missing, unexpected = reference.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all("decoder" in key or "position" in key or "contact" in key or "inv_freq" in key for key in missing)

    batch = batch_of(model, plan)
    tokens, padding = as_rows(batch, alphabet.pad_id)
    if name == "esm1nv":
        expected = reference(tokens, padding)[~padding]
    else:
        expected = reference(tokens, attention_mask=(~padding).long()).logits[~padding]
    found = model(batch)
    close(found, expected)

    for logits in (found, expected):
        torch.nn.functional.cross_entropy(logits, batch.target_ids, reduction="sum").backward()
    gradients = rename({k: v.grad for k, v in model.named_parameters()}, *shape)
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None and key in gradients:
            if key.endswith("self.key.bias"):  # adds the same to all scores of a query: its gradient is rounding noise
                continue
            found_parts, expected_parts = [gradients[key]], [parameter.grad]
            if key.endswith("in_proj_bias"):
                found_parts, expected_parts = (list(g.chunk(3)[::2]) for g in (gradients[key], parameter.grad))
            for found_part, expected_part in zip(found_parts, expected_parts, strict=True):
                close(found_part, expected_part)
