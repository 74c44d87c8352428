# SPDX-License-Identifier: Apache-2.0
"""Mock proteins are reproducible; the lowest possible loss agrees with enumeration and sampling."""

from hashlib import blake2b
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from bionemo.data.collate import Collator
from bionemo.data.proteins import mock
from bionemo.data.proteins.hidden_markov import MASKED, Corruption, HiddenMarkovModel
from bionemo.data.proteins.masking import MaskedDataset, ResidueMasker
from bionemo.data.proteins.mock import MockSource, language
from bionemo.data.proteins.splits import Split
from bionemo.tokenizers import load_tokenizer

CORRUPTION = Corruption(modify_percent=0.15, mask_percent=0.8, perturb_percent=0.1, alternatives=26)

GOLDEN = [
    "PELMCLHAADFHHAKDAAHNAFLPHAY",
    "VTCQTCYTCSTCATCTTCLTG",
    "DNSGAGLGSGAGANSYLGAGQGAGRRSGAGAKSAPGATA",
]


def source(num_sequences: int = 600, split: str = "train", seed: int = 7) -> MockSource:
    return MockSource(num_sequences, min_length=1, max_length=90, seed=seed, split=split)


def gather_all(records: MockSource, order: np.ndarray) -> bytes:
    lengths = records.lengths[order].astype(np.int64)
    out = np.zeros(lengths.sum(), np.uint8)
    records.gather(order, np.zeros_like(lengths), lengths, out, np.cumsum(lengths) - lengths)
    return out.tobytes()


# the source


def test_records_do_not_depend_on_the_rest_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = source(600), source(300)
    assert (large.lengths[:300] == small.lengths).all()
    assert large.lengths.dtype == np.int32
    assert {large.lengths.min(), large.lengths.max()} <= set(range(1, 91))
    order = np.random.default_rng(0).permutation(300)
    assert gather_all(large, order) == gather_all(small, order) == "".join(map(small.text, order)).encode()
    monkeypatch.setattr(mock, "_MAX_CACHED_RESIDUES", 0)  # the same letters without the cache
    assert gather_all(source(300), order) == gather_all(small, order)


def test_seed_and_split_give_other_sequences() -> None:
    texts = {source(seed=seed, split=split).text(5) for seed in (0, 1, -1) for split in ("train", "val", "test")}
    assert len(texts) == 9


def test_letters_are_stable_across_releases() -> None:
    records = MockSource(3, min_length=20, max_length=40, seed=1234, split="train")
    assert [records.text(i) for i in range(3)] == GOLDEN
    assert records.fields(1) == {"id": "mock_train_1", "sequence": GOLDEN[1]}
    assert len(records) == 3
    many = source()
    content = many.lengths.tobytes() + gather_all(many, np.arange(600))
    assert blake2b(content, digest_size=8).hexdigest() == "db9aa9b4eb5e4f89"


def test_letters_do_not_depend_on_earlier_requests() -> None:
    """Requests with repeated records, some of which have been generated before."""
    records, letters = source(), gather_all(source(), np.arange(600))
    ends = np.cumsum(records.lengths)
    for part in np.array_split(np.random.default_rng(1).integers(0, 600, 900), 9):
        expected = b"".join(letters[ends[i] - records.lengths[i] : ends[i]] for i in part)
        assert gather_all(records, part) == expected


def test_gather_writes_only_the_given_positions() -> None:
    records = source()
    record = int(records.lengths.argmax())
    out = np.full(30, ord("#"), np.uint8)
    pick = np.array([record, record])
    records.gather(pick, np.array([0, 10]), np.array([5, 8]), out, np.array([20, 2]))
    text = records.text(record)
    assert out.tobytes().decode() == "##" + text[10:18] + "#" * 10 + text[:5] + "#" * 5
    records.gather(pick[:0], pick[:0], pick[:0], out, pick[:0])


# the language


def test_samples_follow_the_language() -> None:
    model, records = language(), MockSource(1500, min_length=60, max_length=60, seed=3, split="train")
    assert (model.transition_counts.sum(1) == 256).all() and (model.emission_counts.sum(1) == 256).all()
    np.testing.assert_allclose(model.start @ model.transition, model.start, atol=1e-12)
    letters = np.frombuffer(gather_all(records, np.arange(1500)), np.uint8).reshape(1500, 60)
    rank = np.searchsorted(np.frombuffer(model.letters.encode(), np.uint8), letters)
    for lag in (1, 3):
        step = np.linalg.matrix_power(model.transition, lag)
        exact = model.emission.T @ (model.start[:, None] * step) @ model.emission
        seen = np.zeros((20, 20))
        np.add.at(seen, (rank[:, :-lag], rank[:, lag:]), 1 / rank[:, lag:].size)
        assert np.abs(seen - exact).max() < 0.002  # 85,000 pairs; the largest entry is about 0.05
    assert np.abs(np.bincount(rank[:, 0], minlength=20) / 1500 - model.start @ model.emission).max() < 0.04


# the optimum


def enumerate_posterior(model: HiddenMarkovModel, visible: list[int], target: int, how: Corruption) -> np.ndarray:
    """Return p(x_target | visible) by summing over all sequences, state paths and sets of target residues."""
    size, length = len(model.letters), len(visible)
    codes = model.letters.encode()

    def seen(y: int, x: int, is_target: bool) -> float:
        if not is_target:
            return (1 - how.modify_percent) * (y == codes[x])
        if y == MASKED:
            return how.modify_percent * how.mask_percent
        if y == codes[x]:
            return how.modify_percent * how.identity_percent
        return how.modify_percent * how.perturb_percent / how.alternatives

    result = np.zeros(size)
    for x in product(range(size), repeat=length):
        paths = 0.0
        for z in product(range(len(model.start)), repeat=length):
            steps = np.prod([model.transition[a, b] for a, b in pairwise(z)])
            paths += model.start[z[0]] * steps * np.prod(model.emission[list(z), list(x)])
        for others in product([False, True], repeat=length - 1):
            is_target = [*others[:target], True, *others[target:]]
            result[x[target]] += paths * np.prod(
                [seen(y, k, q) for y, k, q in zip(visible, x, is_target, strict=True)]
            )
    return result / result.sum()


def test_posteriors_equal_enumeration() -> None:
    steps = np.array([[16, 200, 40], [30, 26, 200], [240, 8, 8]])
    emits = np.array([[200, 40, 16], [10, 230, 16], [56, 60, 140]])
    model = HiddenMarkovModel("ABC", steps, emits)
    how = Corruption(modify_percent=0.4, mask_percent=0.5, perturb_percent=0.3, alternatives=3)
    sequences = [[65, MASKED, 67, 66, 65], [66, 66, MASKED, MASKED], [ord("X"), 65], [MASKED]]
    targets = [[False, True, False, True, False], [True, False, True, True], [True, True], [True]]
    found = model.posteriors(
        np.concatenate(sequences).astype(np.int16), np.concatenate(targets), np.array([5, 4, 2, 1]), how
    )
    places = [(y, i) for y, which in zip(sequences, targets, strict=True) for i in np.flatnonzero(which)]
    exact = np.array([enumerate_posterior(model, y, i, how) for y, i in places])
    np.testing.assert_allclose(found, exact, rtol=1e-12)


def corrupted(how: Corruption, records: MockSource) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Corrupt all sequences independently of `ResidueMasker`; return true ids, visible ids, targets, lengths."""
    letters = np.frombuffer(gather_all(records, np.arange(len(records))), np.uint8).astype(np.int16)
    draws = np.random.default_rng(2)
    names = np.frombuffer((language().letters + "XBUZO.-").encode(), np.uint8).astype(np.int16)
    rank = np.searchsorted(names[:20], letters)
    targets = draws.random(len(letters)) < how.modify_percent
    kind = draws.choice(3, len(letters), p=[how.mask_percent, how.perturb_percent, how.identity_percent])
    other = draws.integers(0, how.alternatives, len(letters))
    visible = np.where(kind == 0, MASKED, np.where(kind == 1, names[other + (other >= rank)], letters))
    return rank, np.where(targets, visible, letters).astype(np.int16), targets, records.lengths.astype(np.int64)


def test_posteriors_are_calibrated_and_better_than_with_wrong_corruption() -> None:
    records = MockSource(1000, min_length=20, max_length=120, seed=1, split="test")
    rank, visible, targets, lengths = corrupted(CORRUPTION, records)
    best = language().posteriors(visible, targets, lengths, CORRUPTION)
    truth = rank[targets]
    nats = -np.log(best[np.arange(len(best)), truth])
    surprise = nats + (best * np.log(best)).sum(axis=1)  # mean 0 exactly if the posterior is correct
    assert abs(surprise.mean()) < 4 * surprise.std() / len(surprise) ** 0.5
    hit = np.arange(20) == truth[:, None]
    for low, high in [(0, 0.02), (0.02, 0.2), (0.2, 0.7), (0.7, 0.9), (0.9, 1)]:
        chosen = (best >= low) & (best < high)
        spread = np.sqrt((best * (1 - best))[chosen].sum())
        assert abs(hit[chosen].sum() - best[chosen].sum()) < 4.5 * spread
    wrong = [
        Corruption(0.15, 0.8, 0.02, 26),  # trusts the visible residue at a target position
        Corruption(0.15, 0.8, 0.19, 26),  # ignores it
        Corruption(0.9, 0.1, 0.8, 26),  # ignores the context
    ]
    for belief in wrong:
        worse = -np.log(language().posteriors(visible, targets, lengths, belief)[np.arange(len(best)), truth])
        assert (worse - nats).mean() > 0.003


def test_the_optimum_is_far_below_the_entropy_of_the_frequencies() -> None:
    """Test `ResidueMasker.optimal_mock_loss` on batches of a dataset."""
    model = language()
    frequencies = model.start @ model.emission
    assert 2.8 < -(frequencies * np.log(frequencies)).sum() < 2.9
    alphabet = load_tokenizer("esm2nv")
    masker = ResidueMasker(alphabet, 0.15, 0.8, 0.1)
    corruption = Corruption(0.15, 0.8, 0.1, len(alphabet.residue_ids) - 1)
    source, records = MockSource(2000, 126, 126, 0, "val"), np.arange(2000)
    split = Split(source, records, np.zeros(256, np.int64), (), seed=3, crop=False)
    dataset = MaskedDataset(split, alphabet, 128, masker)
    collate = Collator(dataset, 100, alphabet.pad_id)
    samples = [[(np.zeros(1, np.int64), np.array([i])) for i in part] for part in np.split(records, 20)]
    batches = [batch.unpack() for batch in collate(samples)]
    found = masker.optimal_mock_loss(batches)
    assert abs(found - 1.67) < 0.02
    # The loss of masks drawn with another generator. An error of 0.02 in a ratio of the masks changes it by 0.03.
    rank, visible, targets, lengths = corrupted(corruption, source)
    best = model.posteriors(visible, targets, lengths, corruption)
    nats = -np.log(best[np.arange(len(best)), rank[targets]])
    assert abs(found - nats.mean()) < 0.02
    # The ratios themselves, within about five standard errors.
    pairs = [(batch.tokens[batch.target_positions], batch.target_ids) for batch in batches]
    tokens, true = (torch.cat(each) for each in zip(*pairs, strict=True))
    assert len(true) / len(targets) == pytest.approx(0.15, abs=0.004)
    assert (tokens == alphabet.mask_id).double().mean() == pytest.approx(0.8, abs=0.01)
    assert (tokens == true).double().mean() == pytest.approx(0.1, abs=0.008)
