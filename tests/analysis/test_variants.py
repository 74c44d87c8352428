# SPDX-License-Identifier: Apache-2.0
"""Variant scores equal those of transformers' ESM-2, computed one masked residue at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import AMINO_ACIDS, MARGINALS, scan, score_variants
from tests.support.huggingface import theirs
from tests.support.models import build_model

SEQUENCE = "MKTAYIAKQRXQISFVKSHF"
ALPHABET = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedModel, EsmForMaskedLM]:
    path = tmp_path_factory.mktemp("model")
    model = theirs(path)
    return bionemo.load(path, "cpu"), model


@pytest.fixture(scope="module")
def model(models: tuple[TrainedModel, EsmForMaskedLM]) -> TrainedModel:
    return models[0]


def log_probabilities(model: EsmForMaskedLM, place: int, masked: bool) -> Tensor:
    tokens = torch.tensor([[0, *map(ALPHABET.index, SEQUENCE), 2]])
    if masked:
        tokens[0, place + 1] = 32
    with torch.no_grad():
        return model(tokens, attention_mask=torch.ones_like(tokens)).logits[0, place + 1].log_softmax(-1)


def expected(model: EsmForMaskedLM, masked: bool, *mutations: tuple[str, int, str]) -> float:
    """Compute the sum of log p(mutant) - log p(wild type) directly."""
    total = 0.0
    for wild, position, mutant in mutations:
        log_probs = log_probabilities(model, position - 1, masked)
        total += float(log_probs[ALPHABET.index(mutant)] - log_probs[ALPHABET.index(wild)])
    return total


@pytest.mark.parametrize("method", MARGINALS)
def test_scores_equal_those_of_transformers(method: str, models: tuple[TrainedModel, EsmForMaskedLM]) -> None:
    model, reference = models
    texts = ["K2A", "M1A:K2W", "F20C, K2A ,A4G", "wt", "", "A4A", "K2A", "X11W"]
    by_hand = [
        expected(reference, method == "masked-marginal", *mutations)
        for mutations in (
            [("K", 2, "A")], [("M", 1, "A"), ("K", 2, "W")], [("F", 20, "C"), ("K", 2, "A"), ("A", 4, "G")],
            [], [], [("A", 4, "A")], [("K", 2, "A")], [("X", 11, "W")],
        )
    ]  # fmt: skip
    scores = score_variants(model, SEQUENCE, texts, method)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, by_hand, atol=2e-5)
    assert (scores[3:6] == 0).all()
    assert np.abs(scores).max() > 0.1


@pytest.mark.parametrize("method", MARGINALS)
def test_a_scan_contains_every_substitution(method: str, model: TrainedModel) -> None:
    table = scan(model, SEQUENCE, method)
    assert table.shape == (len(SEQUENCE), 20)
    texts = [f"{wild}{position}{mutant}" for position, wild in enumerate(SEQUENCE, 1) for mutant in AMINO_ACIDS]
    np.testing.assert_allclose(table.reshape(-1), score_variants(model, SEQUENCE, texts, method), atol=1e-6)


def test_each_position_is_computed_once(model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, advanced = [], []
    compute = model.token_log_probabilities

    def noted(sequences: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> Tensor:
        positions.extend((tokens - 1).tolist())
        return compute(sequences, rows, tokens)

    monkeypatch.setattr(model, "token_log_probabilities", noted)
    variants = [f"{SEQUENCE[place]}{place + 1}{mutant}" for place in (3, 0, 19) for mutant in AMINO_ACIDS]
    score_variants(model, SEQUENCE, [*variants, "M1A:F20A"], advance=advanced.append)
    assert positions == [0, 3, 19]
    assert sum(advanced) == 3


def test_pseudo_perplexity_equals_that_of_transformers(models: tuple[TrainedModel, EsmForMaskedLM]) -> None:
    model, reference = models

    def likelihood(letters: str) -> float:
        total = 0.0
        for place, letter in enumerate(letters):
            tokens = torch.tensor([[0, *map(ALPHABET.index, letters), 2]])
            tokens[0, place + 1] = 32
            with torch.no_grad():
                logits = reference(tokens, attention_mask=torch.ones_like(tokens)).logits
            total += float(logits[0, place + 1].log_softmax(-1)[ALPHABET.index(letter)])
        return total

    wild_type = likelihood(SEQUENCE)
    by_hand = [likelihood("MKTGYIAKQRXQISFVKSHF") - wild_type, 0.0, likelihood("WKTAYIAKQRXQISFVKSHC") - wild_type]
    advanced: list[int] = []
    scores = score_variants(model, SEQUENCE, ["A4G", "wt", "M1W:F20C"], "pseudo-perplexity", advance=advanced.append)
    np.testing.assert_allclose(scores, by_hand, atol=1e-4)
    assert sum(advanced) == 3 * len(SEQUENCE)


def test_positions_count_from_an_offset(model: TrainedModel) -> None:
    plain = score_variants(model, SEQUENCE, ["K2A"])
    for offset in (23, -5):
        assert score_variants(model, SEQUENCE, [f"K{2 + offset}A"], offset=offset) == plain
    assert score_variants(model, SEQUENCE, []).shape == (0,)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("K3A", "variant 2, K3A: residue 3 is T, not K: check"),
        ("A4G:K21A", "variant 2, K21A: the sequence has residues 1 to 20"),
        ("K0A", "variant 2, K0A: the sequence has residues 1 to 20"),
        ("K2J", "variant 2, K2J: 'J' is not a residue of the vocabulary"),
        ("K2*", "variant 2, K2*: only substitutions can be scored"),
        ("p.Lys2del", "variant 2, p.Lys2del: only substitutions can be scored"),
        ("K2-", "variant 2, K2-: '-' is not a residue"),
        ("k2A", "variant 2, k2A: 'k' is not a residue"),
        ("K2", "variant 2, K2: expected a residue, its position"),
        ("A4G:", "variant 2, A4G:: expected a residue"),
        (
            "p.Lys2Foo",
            "variant 2, p.Lys2Foo: expected a residue, its position and its replacement, as in A24G, several "
            "joined by ':', or HGVS notation, as in p.Ala24Gly or p.[Ala24Gly;Lys30Arg]",
        ),
        ("p.Lys2Ala:p.Ala4Gly", "variant 2, p.Lys2Ala:p.Ala4Gly: expected"),
        ("p.[Lys2Ala];[Ala4Gly]", "variant 2, p.[Lys2Ala];[Ala4Gly]: expected"),
        ("p.Lys2Ala(;)Ala4Gly", "variant 2, p.Lys2Ala(;)Ala4Gly: expected"),
        ("p.[Lys2Ter;Ala4]", "variant 2, p.[Lys2Ter;Ala4]: expected"),
        ("p.Lys3Ala", "variant 2, K3A: residue 3 is T, not K: check"),
        ("K2A:A4G:K2R", "variant 2, K2A:A4G:K2R: residue 2 is mutated twice"),
    ],
)
def test_invalid_variants(variant: str, message: str, model: TrainedModel) -> None:
    with pytest.raises(UserError) as caught:
        score_variants(model, SEQUENCE, ["A4G", variant])
    assert message in str(caught.value)


def test_unsupported_models_and_sequences(model: TrainedModel) -> None:
    with pytest.raises(UserError, match="the sequence has 97 residues, but the model accepts at most 94"):
        score_variants(model, "A" * 97, ["A1G"])
    with pytest.raises(UserError, match="the sequence is empty"):
        scan(model, " ")
    with pytest.raises(UserError, match="the sequence contains no letter of the vocabulary"):
        scan(model, "123")
    with pytest.raises(UserError, match="method='esm' is unknown: choose from masked-marginal, wild-type-marginal"):
        scan(model, SEQUENCE, "esm")
    with pytest.raises(UserError, match="x is a GPT3, not a masked language model: use ESM1nv, ESM1b, ESM2nv or ESMC"):
        scan(TrainedModel(build_model("gpt3"), Path("x")), SEQUENCE)


def test_esm1nv_scores() -> None:
    network = build_model("esm1nv").eval()
    model = TrainedModel(network, Path("x"))
    ids = torch.tensor(model.ids([SEQUENCE])[0].astype(int))
    ids[1] = network.vocabulary.mask_id
    (log_probs,) = model.masked_log_probabilities(model.ids([SEQUENCE])[0], np.array([1]))
    table = network.vocabulary.tokens
    by_hand = log_probs[0, table.index("A")] - log_probs[0, table.index("K")]
    np.testing.assert_allclose(score_variants(model, SEQUENCE, ["K2A"]), by_hand.item(), rtol=1e-6)
