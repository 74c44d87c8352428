# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients agree with independent models with the same random weights, packed and padded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bionemo.config.schema import ModelConfig
from bionemo.tokenizers import Vocabulary
from tests.support.models import assert_close, batch_of, build_model, pad_rows
from tests.support.reference_models import (
    TorchBert,
    TorchSeq2Seq,
    hf_esm1b,
    hf_esm2,
    hf_esmc,
    hf_gpt2,
    to_hf,
    to_hf_esm1b,
    to_hf_esmc,
    to_hf_gpt2,
    to_torch_bert,
    to_torch_seq2seq,
)
from tests.support.runs import MODELS


@dataclass(frozen=True)
class Reference:
    """An independent implementation."""

    build: Callable[[ModelConfig, Vocabulary], nn.Module]  # function that builds it
    # function that converts our parameters, or their gradients, to its names and shapes
    rename: Callable[..., dict[str, Tensor]]
    run: Callable[..., Tensor]  # function that returns the logits of its padded rows


def bert(model: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
    return model(tokens, padding)


def hugging_face(model: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
    return model(tokens, attention_mask=(~padding).long()).logits


def seq2seq(model: nn.Module, tokens: Tensor, padding: Tensor, source: Tensor, source_padding: Tensor) -> Tensor:
    return model(source, source_padding, tokens, padding)


REFERENCES = {
    "esm1nv": Reference(lambda c, v: TorchBert(c, v.vocab_size), to_torch_bert, bert),
    "esm1b": Reference(lambda c, v: hf_esm1b(c, v.vocab_size, v.mask_id, v.pad_id), to_hf_esm1b, hugging_face),
    "esm2nv": Reference(lambda c, v: hf_esm2(c, v.vocab_size, v.mask_id, v.pad_id), to_hf, hugging_face),
    "esmc": Reference(lambda c, v: hf_esmc(c, v.vocab_size), to_hf_esmc, hugging_face),
    "prott5nv": Reference(lambda c, v: TorchSeq2Seq(c, v.vocab_size), to_torch_seq2seq, seq2seq),
    "megamolbart": Reference(lambda c, v: TorchSeq2Seq(c, v.vocab_size), to_torch_seq2seq, seq2seq),
    "gpt3": Reference(lambda c, v: hf_gpt2(c, v.vocab_size), to_hf_gpt2, hugging_face),
}


def without_keys(name: str, gradient: Tensor) -> list[Tensor]:
    """Remove the gradient of the key bias, which is rounding noise: softmax is invariant to it."""
    if name.endswith("self.key.bias"):
        return []
    if name.endswith(("in_proj_bias", "c_attn.bias")):
        return list(gradient.chunk(3)[::2])
    return [gradient]


CASES = [
    *((name, ()) for name in MODELS),
    ("esm1b", ("model.embedding_layer_norm=False",)),  # ESM-1v
    ("esm1b", ("model.embedding_token_dropout=False",)),
]


@pytest.mark.parametrize("rows", [3, 6], ids=["packed", "padded"])
@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_logits_and_gradients_equal_the_reference(name: str, overrides: tuple[str, ...], rows: int) -> None:
    model = build_model(name, *overrides).train()
    config, vocabulary = model.config, model.vocabulary
    kind = REFERENCES[name]
    shape = (config.num_layers, config.num_attention_heads, vocabulary.vocab_size)
    reference: Any = kind.build(config, vocabulary)
    weights = kind.rename({k: v.detach().clone() for k, v in model.named_parameters()}, *shape)
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("decoder.weight" in key or "decoder.bias" in key or "position_ids" in key or "contact" in key
               or "inv_freq" in key or key.endswith("attn.bias") for key in missing)  # fmt: skip

    batch = batch_of(model, rows)
    tokens, padding = pad_rows(batch)
    source = () if batch.source is None else pad_rows(batch.source)
    expected = kind.run(reference, tokens, padding, *source)[~padding]
    found = model(batch)
    assert found[:, vocabulary.vocab_size :].eq(-torch.inf).all()
    assert_close(found[:, : vocabulary.vocab_size], expected)

    for logits in (found, expected):
        torch.nn.functional.cross_entropy(logits, batch.target_ids, reduction="sum").backward()
    gradients = kind.rename({k: v.grad for k, v in model.named_parameters()}, *shape)
    compared = 0
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None and key in gradients:
            pairs = zip(without_keys(key, gradients[key]), without_keys(key, parameter.grad), strict=True)
            for found_part, expected_part in pairs:
                assert_close(found_part, expected_part)
                compared += 1
    assert compared > 10 * config.num_layers
