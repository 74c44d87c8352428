# SPDX-License-Identifier: Apache-2.0
"""Scores of proteins that are longer than the model equal those of transformers' ESM-2 on ProteinGym's windows."""

import math

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import MARGINALS, score_variants
from bionemo.inference.windows import WindowType, make_windows
from tests.analysis.test_variants import ALPHABET
from tests.support.huggingface import theirs

SIZE = 96  # tokens of the model
PROTEIN = "".join(np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), 210))


def weight_of(offset: int, size: int) -> float:
    """Return the weight of a token of a window with ProteinGym's constants for 1,024 tokens, scaled to `size`."""
    edge, slope = size // 4, 16 * size / 1024
    if 1 <= offset <= edge:
        return 1 / (1 + math.exp(-(offset - edge / 2) / slope))
    if size - 2 - edge <= offset <= size - 2:
        return 1 / (1 + math.exp((offset - (size - 2) + edge / 2) / slope))
    return 1.0


def starts_of(token: int, tokens: int, kind: WindowType) -> list[int]:
    """Return the windows of a token, in proteins of the lengths used here."""
    if kind == "optimal":
        return [max(0, min(token - SIZE // 2, tokens - SIZE))]
    assert tokens == 212
    return [start for start in (0, 47, 116, 69) if start <= token < start + SIZE]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedModel, EsmForMaskedLM]:
    path = tmp_path_factory.mktemp("model")
    model = theirs(path)
    return bionemo.load(path, "cpu"), model


@pytest.mark.parametrize("kind", ["optimal", "overlapping"])
@pytest.mark.parametrize("method", MARGINALS)
def test_scores_of_long_proteins_equal_those_of_transformers(
    method: str, kind: WindowType, models: tuple[TrainedModel, EsmForMaskedLM]
) -> None:
    model, reference = models
    assert model.network.config.max_position_embeddings == SIZE
    tokens = torch.tensor([0, *map(ALPHABET.index, PROTEIN), 2])

    def log_probabilities(token: int) -> torch.Tensor:
        sums, total = torch.zeros(len(reference.state_dict()["lm_head.bias"]), dtype=torch.float64), 0.0
        for start in starts_of(token, len(tokens), kind):
            window = tokens[None, start : start + SIZE].clone()
            if method == "masked-marginal":
                window[0, token - start] = 32
            with torch.no_grad():
                logits = reference(window, attention_mask=torch.ones_like(window)).logits
            weight = weight_of(token - start, SIZE) if kind == "overlapping" else 1.0
            sums += weight * logits[0, token - start].log_softmax(-1).double()
            total += weight
        return sums / total

    positions = 1, 2, 47, 48, 60, 105, 140, 163, 164, 209, 210
    variants, by_hand = [], []
    for position in positions:
        found, wild = log_probabilities(position), PROTEIN[position - 1]
        variants.append(f"{wild}{position}{'W' if wild != 'W' else 'A'}")
        by_hand.append(float(found[ALPHABET.index(variants[-1][-1])] - found[ALPHABET.index(wild)]))
    variants.append(":".join(variants[2:5]))
    by_hand.append(sum(by_hand[2:5]))
    np.testing.assert_allclose(score_variants(model, PROTEIN, variants, method, window=kind), by_hand, atol=1e-4)


def test_weights_of_a_window_of_1024_tokens() -> None:
    expected = np.ones(1024)  # the loops of ProteinGym
    for i in range(1, 257):
        expected[i] = 1 / (1 + math.exp(-(i - 128) / 16))
    for i in range(1022 - 256, 1023):
        expected[i] = 1 / (1 + math.exp((i - 1022 + 128) / 16))
    pairs = make_windows(np.arange(3000), 3000, 1024, "overlapping")
    first = pairs.start == 0
    assert (pairs.position[first] == np.arange(1024)).all()
    np.testing.assert_allclose(pairs.weight[first], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        (1025, {0, 1}),
        (2046, {0, 511, 1022}),  # the outer windows share two tokens
        (2047, {0, 511, 512, 1023}),
        (2559, {0, 511, 1024, 1535}),  # the inner windows share 511 tokens
        (2600, {0, 511, 788, 1065, 1576}),  # they share 470 tokens, fewer than 511: one more in the middle
    ],
)
def test_starts_of_overlapping_windows(tokens: int, starts: set[int]) -> None:
    pairs = make_windows(np.arange(tokens), tokens, 1024, "overlapping")
    assert set(pairs.start.tolist()) == starts
    assert (np.unique(pairs.position) == np.arange(tokens)).all()


@pytest.mark.parametrize("kind", ["optimal", "overlapping"])
def test_a_protein_that_fits_has_one_window(kind: WindowType) -> None:
    pairs = make_windows(np.array([3, 9]), 1024, 1024, kind)
    assert pairs.start.tolist() == [0, 0]
    assert pairs.position.tolist() == [0, 1]
    assert pairs.weight.tolist() == [1, 1]
