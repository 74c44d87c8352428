# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, and packed batches for them."""

import torch
from torch import Tensor

from bionemo.config.compose import load
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.models.language_model import LanguageModel, load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.support.runs import MODELS

SMALL = ["model.num_layers=3", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=256",
         "model.seq_length=96", "model.hidden_dropout=0.0", "model.attention_dropout=0.0"]  # fmt: skip
LENGTHS = (10, 96, 33, 57, 2, 41)  # input lengths; encoder input for an encoder-decoder
TARGET_LENGTHS = (7, 40, 1, 96, 13, 5)  # decoder lengths of an encoder-decoder


def build_model(name: str, *overrides: str) -> LanguageModel:
    family = MODELS[name]
    small = [*family.overrides, *SMALL, "model.make_vocab_size_divisible_by=8", *overrides]
    cfg = load(family.name, small, family.directory / "conf")
    kind = load_model_class(cfg.model._target_)
    model = kind(cfg.model, load_tokenizer(kind.tokenizer, cfg.model.tokenizer))
    model.initialize_weights(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases and norms, too, must differ from their initial values to be distinguishable
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def random_tokens(model: LanguageModel, lengths: tuple[int, ...], rows: int, seed: int) -> TokenSequences:
    """Return random tokens, including mask tokens; `rows` determines the amount of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(model.vocabulary.vocab_size, 500), (rows * 96,), generator=generator).numpy()
    if (mask_id := getattr(model.vocabulary, "mask_id", None)) is not None:
        ids[::7] = mask_id
    counts = torch.tensor(lengths).numpy()
    keys = counts.astype("uint64")
    return TokenSequences(ids, counts, 96, keys)


def batch_of(model: LanguageModel, rows: int) -> PackedBatch:
    """Return a batch of six sequences; every token is a target position."""
    pair = hasattr(model, "encode")
    inputs = random_tokens(model, TARGET_LENGTHS if pair else LENGTHS, rows, seed=3)
    number = int(inputs.lengths.sum())
    answers = torch.randint(4, 20, (number,), generator=torch.Generator().manual_seed(6)).numpy()
    source = random_tokens(model, LENGTHS, rows, seed=4) if pair else None
    return TokenizedBatch(inputs, torch.arange(number).numpy(), answers, source=source).unpack()


def pad_rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the same sequences as padded rows, and the padding mask: the input of the reference models."""
    pieces = batch.tokens[: batch.num_tokens].long().split(batch.lengths)
    tokens = torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True, padding_value=0)
    lengths = torch.tensor(batch.lengths)
    return tokens, torch.arange(tokens.shape[1]) >= lengths[:, None]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare with a tolerance of 1e-5 of the largest value."""
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error < 1e-5, float(error)
