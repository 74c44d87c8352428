# SPDX-License-Identifier: Apache-2.0
"""Our models against independent ones with the same random weights: logits and gradients, packed and padded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bionemo.config.compose import load
from bionemo.config.schema import ModelConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Parts, Stream, assemble
from bionemo.models.build import model_class
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Vocabulary, load_tokenizer
from tests.models.reference import (
    TorchBert,
    TorchSeq2Seq,
    hf_esm1b,
    hf_esm2,
    hf_gpt2,
    to_hf,
    to_hf_esm1b,
    to_hf_gpt2,
    to_torch_bert,
    to_torch_seq2seq,
)
from tests.training.runs import MODELS

SMALL = ["model.num_layers=3", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=256",
         "model.seq_length=96", "model.hidden_dropout=0.0", "model.attention_dropout=0.0"]  # fmt: skip
LENGTHS = (10, 96, 33, 57, 2, 41)  # of what is read; of an encoder-decoder, by its encoder
SAID = (7, 40, 1, 96, 13, 5)  # by its decoder


@dataclass(frozen=True)
class Reference:
    """Another implementation.

    Attributes:
        build: makes it.
        rename: gives our parameters, or their gradients, its names and shapes.
        run: logits of its padded rows.
    """

    build: Callable[[ModelConfig, Vocabulary], nn.Module]
    rename: Callable[..., dict[str, Tensor]]
    run: Callable[..., Tensor]


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
    "prott5nv": Reference(lambda c, v: TorchSeq2Seq(c, v.vocab_size), to_torch_seq2seq, seq2seq),
    "megamolbart": Reference(lambda c, v: TorchSeq2Seq(c, v.vocab_size), to_torch_seq2seq, seq2seq),
    "gpt3": Reference(lambda c, v: hf_gpt2(c, v.vocab_size), to_hf_gpt2, hugging_face),
}


def ours(name: str, *words: str) -> LanguageModel:
    family = MODELS[name]
    small = [*family.words, *SMALL, "model.make_vocab_size_divisible_by=8", *words]
    cfg = load(family.name, small, family.directory / "conf")
    kind = model_class(cfg.model._target_)
    model = kind(cfg.model, load_tokenizer(kind.tokenizer, cfg.model.tokenizer))
    model.initialise(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases and norms too must differ from their initial values to be told apart
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def stream(model: LanguageModel, lengths: tuple[int, ...], rows: int, seed: int) -> Stream:
    """Random tokens: packed into few rows, or as many rows as sequences; ESM's masked tokens are among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(model.vocabulary.vocab_size, 500), (rows * 96,), generator=generator).numpy()
    if (mask_id := getattr(model.vocabulary, "mask_id", None)) is not None:
        ids[::7] = mask_id
    counts = torch.tensor(lengths).numpy()
    keys = counts.astype("uint64")
    return Stream(ids, counts, keys, 96)


def batch_of(model: LanguageModel, rows: int) -> PackedBatch:
    """Six sequences; every real token is asked for."""
    pair = hasattr(model, "encode")
    said = stream(model, SAID if pair else LENGTHS, rows, seed=3)
    number = int(said.lengths.sum())
    answers = torch.randint(4, 20, (number,), generator=torch.Generator().manual_seed(6)).numpy()
    source = stream(model, LENGTHS, rows, seed=4) if pair else None
    return assemble(Parts(said, torch.arange(number).numpy(), answers, source=source))


def as_rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The same sequences as a padded batch, and where it is padding: what the reference models read."""
    pieces = batch.tokens[: batch.num_tokens].long().split(batch.lengths)
    tokens = torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True, padding_value=0)
    lengths = torch.tensor(batch.lengths)
    return tokens, torch.arange(tokens.shape[1]) >= lengths[:, None]


def close(found: Tensor, expected: Tensor) -> None:
    """Equal within 1e-5 of the largest value."""
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error < 1e-5, float(error)


def without_keys(name: str, gradient: Tensor) -> list[Tensor]:
    """A key's bias adds the same to all scores of a query: its gradient is rounding noise."""
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
@pytest.mark.parametrize(("name", "words"), CASES)
def test_logits_and_gradients_equal_the_reference(name: str, words: tuple[str, ...], rows: int) -> None:
    model = ours(name, *words).train()
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
    tokens, padding = as_rows(batch)
    source = () if batch.source is None else as_rows(batch.source)
    expected = kind.run(reference, tokens, padding, *source)[~padding]
    found = model(batch)
    close(found, expected)

    for logits in (found, expected):
        torch.nn.functional.cross_entropy(logits, batch.target_ids, reduction="sum").backward()
    gradients = kind.rename({k: v.grad for k, v in model.named_parameters()}, *shape)
    compared = 0
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None and key in gradients:
            pairs = zip(without_keys(key, gradients[key]), without_keys(key, parameter.grad), strict=True)
            for found_part, expected_part in pairs:
                close(found_part, expected_part)
                compared += 1
    assert compared > 10 * config.num_layers
