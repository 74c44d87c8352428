# SPDX-License-Identifier: Apache-2.0
"""Assumed lengths, compared with random draws and with batches of real datasets."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.data_module import SequenceData
from bionemo.data.sampler import DataPosition
from bionemo.models.language_model import load_model_class
from bionemo.planning.lengths import ZINC, Tokens, estimate_tokens
from bionemo.tokenizers import load_tokenizer
from tests.planning.simulated_rank import config, rows_of, tokens_read


@pytest.mark.parametrize("limit", [100, 512, 1024, 100_000])
@pytest.mark.parametrize("name", ["esm2nv", "prott5nv"])
def test_protein_lengths_match_uniref50(name: str, limit: int) -> None:
    ends = 2 if name == "esm2nv" else 0
    sigma = np.sqrt(2 * np.log(278 / 210))
    drawn = np.minimum(np.random.default_rng(0).lognormal(np.log(210), sigma, 10**6), limit - ends) + ends
    few = {"masked_lm_prob": 0.0005} if name == "prott5nv" else {}  # there is a sentinel for each masked residue
    tokens = estimate_tokens(config(name, seq_length=limit, data_impl="csv_fields_mmap", **few).model)[0]
    assert tokens.mean == pytest.approx(drawn.mean(), rel=0.005)
    assert tokens.attended == pytest.approx((drawn**2).mean() / drawn.mean(), rel=0.01)
    assert "UniRef50" in tokens.source


def test_packed_rows_are_full() -> None:
    [tokens] = estimate_tokens(config("esm2nv", seq_length=1024, data_impl="csv_fields_mmap").model)
    assert (tokens.row, tokens.count(3), tokens.max_length) == (1024, 3072, 1024)
    assert tokens.filled == pytest.approx(1)
    assert 278 < tokens.attended < 1024


def sequences(tokens: Tokens) -> float:
    """Return the sequences per row."""
    return tokens.row * tokens.filled / tokens.mean


def test_text_rows_are_full() -> None:
    [tokens] = estimate_tokens(config("gpt3", data_impl="mmap", seq_length=2048).model)
    assert (tokens.attended, tokens.mean, tokens.filled, tokens.target_fraction) == (2048, 2048, 1, 1)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("esm2nv", {"seq_length": 512}),
    ("esm2nv", {"seq_length": 256, "packing": False}),
    ("esm1nv", {"seq_length": 512, "packing": False, "dynamic_padding": True}),
    ("gpt3", {"seq_length": 512}),
    ("megamolbart", {"micro_batch_size": 32, "encoder_augment": False}),
    (  # the decoder's rows are full first
        "prott5nv",
        {"seq_length": 512, "masked_lm_prob": 0.374, "num_sentinel_tokens": 200},
    ),
]
MORE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("prott5nv", {"seq_length": 256, "packing": False}),
    ("prott5nv", {"seq_length": 512}),
    ("megamolbart", {"micro_batch_size": 32, "encoder_augment": False, "encoder_mask": False, "seq_length": 40}),
]


@pytest.mark.parametrize(
    ("name", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_assumed_tokens_match_training_batches(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    cfg = config(name, **changes)
    if name == "megamolbart":
        cfg.model.data.train.dataset_path, cfg.model.data.train.range = str(write_molecules(tmp_path)), "x000"
    batches = list(islice(training_batches(cfg), 100))
    rows = rows_of(cfg)
    for planned, found in zip(estimate_tokens(cfg.model), zip(*map(tokens_read, batches), strict=True), strict=True):
        unpadded, sizes = [tokens.unpadded(1) for tokens in found], [tokens.row for tokens in found]
        assert planned.unpadded(rows) == pytest.approx(fmean(unpadded), rel=0.04)  # mock proteins are never short
        assert planned.mean == pytest.approx(sum(unpadded) / sum(map(sequences, found)), rel=0.02)
        assert planned.count(rows) == pytest.approx(fmean(sizes), rel=0.03, abs=planned.multiple)
        assert planned.max_length >= max(tokens.max_length for tokens in found)
        for field in ("attended", "cross_attended", "target_fraction"):
            mean = np.average([getattr(tokens, field) for tokens in found], weights=unpadded)
            assert getattr(planned, field) == pytest.approx(mean, rel=0.03), field


def training_batches(cfg: RunConfig) -> Iterator[PackedBatch]:
    """Yield the micro-batches of a run."""
    model_class = load_model_class(cfg.model._target_)
    vocabulary = load_tokenizer(model_class.tokenizer, cfg.model.tokenizer)
    micro_batches = MicroBatches(rows_of(cfg), 1)
    data = SequenceData(cfg.model, cfg.trainer, vocabulary, model_class.dataset, micro_batches)
    for step in data.steps("train", True, None, micro_batches, DataPosition()):
        yield from step.micro_batches


def write_molecules(directory: Path) -> Path:
    """Write alkanes with as many atoms as ZINC's molecules have tokens."""
    drawn = np.random.default_rng(0).normal(*ZINC, 5000).round().clip(1).astype(int)
    (directory / "train").mkdir()
    lines = "".join(f"{number},{'C' * length}\n" for number, length in enumerate(drawn))
    (directory / "train" / "x000.csv").write_text(f"zinc_id,smiles\n{lines}")
    return directory
