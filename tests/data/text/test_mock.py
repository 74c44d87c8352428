# SPDX-License-Identifier: Apache-2.0
"""Mock text follows its distribution exactly, and its lowest possible loss is computed from that distribution."""

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bionemo.common.errors import UserError
from bionemo.data.dataset import TokenizedBatch
from bionemo.data.text import mock as mock_text
from bionemo.data.text.dataset import DocumentOptions, TextDataset
from bionemo.data.text.mock import MockLanguage, MockText, language

SMALL = 12, 4  # vocabulary and EOD


def stream(seed: int = 1, split: str = "train", vocabulary: tuple[int, int] = SMALL) -> MockText:
    return MockText(*vocabulary, num_samples=1000, seq_length=100, seed=seed, split=split)


def transitions(model: MockLanguage) -> np.ndarray:
    """Return P(next | token) [V, V], computed from the definition of the language."""
    words, end = model.vocab_size - 1, mock_text._END / mock_text._UNIT
    follow = mock_text._FOLLOW / mock_text._UNIT
    drawn = np.zeros(model.vocab_size)
    for position in model.drawn.tolist():
        drawn[model.cycle[position]] += 1 / mock_text._UNIT
    table = np.empty((model.vocab_size, model.vocab_size))
    table[model.eod_id] = (1 - end) * drawn
    for position, word in enumerate(model.cycle.tolist()):
        table[word] = (1 - end - follow) * drawn
        table[word, model.cycle[(position + 1) % words]] += follow
    table[:, model.eod_id] = end
    return table


def optimal_loss(model: MockLanguage, batch: TokenizedBatch) -> float:
    """Return the mean loss of the best possible predictor at the target positions, in nats."""
    return model.total_loss(batch.inputs.ids[batch.target_positions], batch.target_ids) / len(batch.target_ids)


@pytest.fixture(scope="module")
def long_text() -> np.ndarray:
    return stream().read(np.arange(0, 2_000_000, 1000), 1001)


def test_the_language_is_one_cycle_through_all_words() -> None:
    for size, eod_id in ((50257, 50256), (12, 0), (70_000, 3), (3, 1)):
        model = language(size, eod_id)
        assert sorted(model.cycle.tolist()) == sorted({*range(size)} - {eod_id})
        assert model.drawn.shape == (1 << 16,) and 0 <= model.drawn.min() <= model.drawn.max() < size - 1
    counts = np.sort(np.bincount(language(50257, 50256).drawn))[::-1]
    slope = np.polyfit(np.log(np.arange(1, 101)), np.log(counts[:100]), 1)[0]
    assert slope == pytest.approx(-1.5, abs=0.02)


def test_successive_tokens_follow_the_distribution(long_text: np.ndarray) -> None:
    model = language(*SMALL)
    seen = np.zeros((SMALL[0], SMALL[0]))
    np.add.at(seen, (long_text[:, :-1], long_text[:, 1:]), 1)
    expected = transitions(model)
    assert expected.sum(axis=1) == pytest.approx(np.ones(SMALL[0]))
    for row, probabilities in zip(seen, expected, strict=True):
        assert row.sum() > 5000
        assert stats.chisquare(row[probabilities > 0], row.sum() * probabilities[probabilities > 0]).pvalue > 1e-4
        assert not row[probabilities == 0].any()


def test_the_text_is_a_markov_chain(long_text: np.ndarray) -> None:
    before, token, after = (long_text[:, at : at + 999].ravel() for at in range(3))
    for word in (language(*SMALL).cycle[0], language(*SMALL).cycle[5], SMALL[1]):
        here = token == word
        table = np.zeros((SMALL[0], SMALL[0]))
        np.add.at(table, (before[here], after[here]), 1)
        table = table[table.sum(axis=1) > 200]
        table = table[:, table.sum(axis=0) > 200]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_the_lowest_loss_equals_that_of_the_distribution() -> None:
    model = language(*SMALL)
    expected = transitions(model)
    share = np.linalg.matrix_power(expected, 2000)[0]
    entropy = -(share[:, None] * expected * np.log(np.where(expected > 0, expected, 1))).sum()
    for options in (DocumentOptions(), DocumentOptions(True, eod_mask_loss=True)):
        samples = TextDataset(
            [stream()], seq_length=100, vocab_size=SMALL[0], eod_id=SMALL[1], seed=1, options=options
        )
        batch = samples.tokenize(np.arange(1000) % 3, samples.records)
        by_hand = [
            -np.log(expected[batch.inputs.ids[at], answer])
            for at, answer in zip(batch.target_positions, batch.target_ids, strict=True)
        ]
        assert optimal_loss(model, batch) == pytest.approx(np.mean(by_hand))
        assert optimal_loss(model, batch) == pytest.approx(entropy, abs=0.03)
    assert model.unigram_entropy() == pytest.approx(-(share * np.log(share)).sum())


def test_the_lowest_loss_is_far_below_the_unigram_entropy() -> None:
    text = stream(vocabulary=(50257, 50256))
    samples = TextDataset([text], seq_length=100, vocab_size=50257, eod_id=50256, seed=1)
    best = optimal_loss(text.language, samples.tokenize(np.zeros(200, int), samples.records[:200]))
    tokens = text.read(np.arange(0, 10**6, 1000), 1000)
    frequency = np.bincount(tokens.ravel()) / tokens.size
    found = -(frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum()
    assert text.language.unigram_entropy() == pytest.approx(found, abs=0.03)
    assert best < text.language.unigram_entropy() - 2 < np.log(50257) - 5


@settings(max_examples=50)
@given(st.integers(0, 5000), st.integers(1, 300), st.integers(0, 3), st.sampled_from([SMALL, (70_000, 5)]))
def test_random_access(start: int, count: int, seed: int, vocabulary: tuple[int, int]) -> None:
    text = stream(seed, vocabulary=vocabulary)
    whole = text.read(np.array([0]), 5300)[0]
    parts = text.read(np.array([start, 17, start + 1]), count)
    assert parts.dtype == (np.uint16 if vocabulary == SMALL else np.int32)
    assert parts[0].tolist() == whole[start : start + count].tolist()
    assert parts[1].tolist() == whole[17 : 17 + count].tolist()
    assert parts[2].tolist() == [*whole, *text.read(np.array([5300]), 1)[0]][start + 1 : start + 1 + count]


@pytest.fixture
def short_sight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mock_text, "_LOOK_BACK", 2)
    yield


def test_the_look_back_does_not_change_the_text(short_sight: None) -> None:
    near = stream().read(np.arange(0, 4000), 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mock_text, "_LOOK_BACK", 1000)
        assert stream().read(np.arange(0, 4000), 7).tolist() == near.tolist()


def test_seeds_splits_and_passes_produce_different_texts() -> None:
    texts = [stream(seed, split).read(np.array([0]), 500)[0] for seed in (1, 2) for split in ("train", "val")]
    assert all((one != other).mean() > 0.5 for at, one in enumerate(texts) for other in texts[:at])
    behind = stream().read(np.array([stream().size]), 500)[0]
    assert (behind != texts[0]).mean() > 0.5
    ends = stream().read(np.arange(0, 10**6, 1000), 1000) == SMALL[1]
    assert ends.mean() == pytest.approx(1 / 256, rel=0.1)


def test_pickle_fingerprint_and_errors() -> None:
    text = stream()
    again = pickle.loads(pickle.dumps(text))
    assert again.read(np.array([5]), 50).tolist() == text.read(np.array([5]), 50).tolist()
    assert again.fingerprint == text.fingerprint != stream(2).fingerprint
    for size, eod_id in ((2, 0), (10, 10)):
        with pytest.raises(UserError, match="at least two words"):
            MockText(size, eod_id, num_samples=1, seq_length=8, seed=1, split="train")
