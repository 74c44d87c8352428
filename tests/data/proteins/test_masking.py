# SPDX-License-Identifier: Apache-2.0
"""Masks have the configured fractions, contain only valid tokens, and depend on their own sequence only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.proteins.masking import ResidueMasker
from bionemo.tokenizers import load_tokenizer

NAMES = ["esm1nv", "esm2nv"]


def packed(name: str, lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random residues between BOS and EOS, a key for each sequence and the token counts."""
    alphabet, draws = load_tokenizer(name), np.random.default_rng(seed)
    rows = [[alphabet.bos_id, *draws.choice(alphabet.residue_ids, n), alphabet.eos_id] for n in lengths]
    records = np.arange(len(lengths))
    keys = sample_keys(purpose_key(seed, "mask"), np.zeros_like(records), records)
    return np.concatenate(rows).astype(np.uint8), keys, np.array(lengths, np.int64) + 2


def within(count: int, number: int, share: float) -> bool:
    """Return whether a binomial count is within five standard deviations."""
    return abs(count - number * share) <= 5 * np.sqrt(number * share * (1 - share)) + 1e-9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("modify", "mask", "perturb"),
    [(0.15, 0.8, 0.1), (0.4, 0.2, 0.5), (1.0, 0.0, 1.0), (0.05, 1.0, 0.0), (0.3, 0.0, 0.0)],
)
def test_fractions_match_the_options(name: str, modify: float, mask: float, perturb: float) -> None:
    alphabet = load_tokenizer(name)
    tokens, keys, lengths = packed(name, [500] * 200)
    before = tokens.copy()
    index, answers = ResidueMasker(alphabet, modify, mask, perturb)(tokens, keys, lengths)
    assert (np.diff(index) > 0).all()
    assert (answers == before[index]).all()
    untouched = np.ones(len(tokens), bool)
    untouched[index] = False
    assert (tokens[untouched] == before[untouched]).all()
    assert within(len(index), 200 * 500, modify)
    masked = int((tokens[index] == alphabet.mask_id).sum())
    kept = int((tokens[index] == answers).sum())
    assert within(masked, len(index), mask)
    assert within(kept, len(index), 1 - mask - perturb)
    assert within(len(index) - masked - kept, len(index), perturb)


@pytest.mark.parametrize("name", NAMES)
def test_any_other_residue_is_equally_likely_and_never_the_same_or_a_special_token(name: str) -> None:
    alphabet = load_tokenizer(name)
    tokens, keys, lengths = packed(name, [1000] * 150)
    _, answers = ResidueMasker(alphabet, 1.0, 0.0, 1.0)(tokens, keys, lengths)
    visible = tokens[(tokens != alphabet.bos_id) & (tokens != alphabet.eos_id)]
    assert len(visible) == len(answers) == 150_000
    assert not any(alphabet.tokens[token].startswith("<") for token in np.unique(visible))
    pairs = np.zeros((256, 256))
    np.add.at(pairs, (answers, visible), 1)
    residues = alphabet.residue_ids
    table = pairs[np.ix_(residues, residues)]
    assert table.sum() == 150_000
    assert (np.diagonal(table) == 0).all()
    expected = np.broadcast_to(table.sum(axis=1, keepdims=True) / (len(residues) - 1), table.shape)
    apart = ~np.eye(len(residues), dtype=bool)
    chi = ((table - expected)[apart] ** 2 / expected[apart]).sum()
    freedom = len(residues) * (len(residues) - 2)
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)


def test_unknown_letters_are_masked_like_residues() -> None:
    alphabet = load_tokenizer("esm2nv")
    tokens, keys, lengths = packed("esm2nv", [2000] * 20)
    inner = (tokens != alphabet.bos_id) & (tokens != alphabet.eos_id)
    tokens[inner] = alphabet.unk_id
    index, answers = ResidueMasker(alphabet, 1.0, 0.0, 1.0)(tokens, keys, lengths)
    assert (answers == alphabet.unk_id).all()
    assert np.array_equal(index, np.flatnonzero(inner))
    assert np.array_equal(np.unique(tokens[index]), alphabet.residue_ids)


def test_special_tokens_are_targets_only_if_enabled() -> None:
    alphabet = load_tokenizer("esm1nv")
    specials = (alphabet.bos_id, alphabet.eos_id)
    tokens, keys, lengths = packed("esm1nv", [3] * 4000)
    masked, perturbed = tokens.copy(), tokens.copy()
    _, answers = ResidueMasker(alphabet, 0.9, 0.8, 0.1)(masked, keys, lengths)
    assert not np.isin(answers, specials).any()
    assert (masked[np.isin(tokens, specials)] == tokens[np.isin(tokens, specials)]).all()
    _, answers = ResidueMasker(alphabet, 0.5, 0.0, 1.0, mask_special_tokens=True)(perturbed, keys, lengths)
    for special in specials:
        assert within(int((answers == special).sum()), 4000, 0.5)
    assert not np.isin(perturbed, [alphabet.mask_id, alphabet.pad_id, alphabet.unk_id]).any()


def test_every_sequence_with_a_residue_has_a_target() -> None:
    alphabet = load_tokenizer("esm2nv")
    tokens, keys, lengths = packed("esm2nv", [1, 0, 2, 7, 0, 30] * 300)
    index, _ = ResidueMasker(alphabet, 0.001, 0.8, 0.1)(tokens, keys, lengths)
    targets = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[index], minlength=len(lengths))
    assert ((targets > 0) == (lengths > 2)).all()
    assert targets.sum() < 1.1 * (lengths > 2).sum()  # and rarely more


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.0, 1.0), (0.0, 0.0), (0.3, 0.3)])
def test_a_forced_target_is_uniformly_distributed_and_replaced_like_others(shares: tuple[float, float]) -> None:
    alphabet = load_tokenizer("esm2nv")
    tokens, keys, lengths = packed("esm2nv", [8] * 8000)
    index, answers = ResidueMasker(alphabet, 1e-6, *shares)(tokens, keys, lengths)
    assert len(index) == 8000
    places = np.bincount(index % 10, minlength=10)
    assert places[0] == places[9] == 0
    assert all(within(int(count), 8000, 1 / 8) for count in places[1:9])
    masked, kept = int((tokens[index] == alphabet.mask_id).sum()), int((tokens[index] == answers).sum())
    assert within(masked, 8000, shares[0])
    assert within(kept, 8000, 1 - sum(shares))


def test_no_targets_at_zero_or_without_tokens() -> None:
    alphabet = load_tokenizer("esm2nv")
    tokens, keys, lengths = packed("esm2nv", [40, 9])
    before = tokens.copy()
    index, answers = ResidueMasker(alphabet, 0.0, 0.8, 0.1)(tokens, keys, lengths)
    assert len(index) == len(answers) == 0
    assert (tokens == before).all()
    none = np.zeros(0, np.int64)
    index, answers = ResidueMasker(alphabet, 0.5, 0.8, 0.1)(none.astype(np.uint8), none.astype(np.uint64), none)
    assert len(index) == len(answers) == 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.sampled_from([0.02, 0.15, 1.0]),
    st.booleans(),
)
def test_masks_do_not_depend_on_other_sequences(
    residues: list[int], shuffler: object, modify: float, special: bool
) -> None:
    masking = ResidueMasker(load_tokenizer("esm2nv"), modify, 0.6, 0.3, special)
    tokens, keys, lengths = packed("esm2nv", residues, seed=3)
    pieces = np.split(tokens, np.cumsum(lengths)[:-1])
    order = list(range(len(residues)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    together = np.concatenate([pieces[i] for i in order])
    index, answers = masking(together, keys[order], lengths[order])
    start = 0
    for i in order:
        alone = pieces[i].copy()
        own_index, own_answers = masking(alone, keys[i : i + 1], lengths[i : i + 1])
        here = (index >= start) & (index < start + lengths[i])
        assert (index[here] - start).tolist() == own_index.tolist()
        assert answers[here].tolist() == own_answers.tolist()
        assert together[start : start + lengths[i]].tolist() == alone.tolist()
        start += lengths[i]


def test_masks_change_with_epoch_seed_and_record() -> None:
    masking = ResidueMasker(load_tokenizer("esm2nv"), 0.15, 0.8, 0.1)
    tokens, _, lengths = packed("esm2nv", [400])
    masks = set()
    for seed, epoch, record in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        key = sample_keys(purpose_key(seed, "mask"), np.array([epoch]), np.array([record]))
        masks.add(tuple(masking(tokens.copy(), key, lengths)[0].tolist()))
    assert len(masks) == 4


@pytest.mark.parametrize("shares", [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.5, 0.0), (0.2, 0.5)])
def test_unigram_loss_equals_the_empirical_conditional_entropy(shares: tuple[float, float]) -> None:
    """Compare with the entropy of the true residue given the visible one, over two million residues."""
    alphabet, rng = load_tokenizer("esm2nv"), np.random.default_rng(0)
    frequencies = rng.dirichlet(np.full(20, 2.0))
    masking = ResidueMasker(alphabet, 1.0, *shares)
    residues = alphabet.residue_ids[:20]
    truth = rng.choice(residues, 2_000_000, p=frequencies)
    tokens = np.concatenate([[alphabet.bos_id], truth, [alphabet.eos_id]]).astype(np.uint8)
    index, answers = masking(tokens, np.array([7], np.uint64), np.array([len(tokens)]))
    together = np.zeros((256, 256))
    np.add.at(together, (answers, tokens[index]), 1.0)
    together /= together.sum()
    occurs = together > 0
    counted = -(together[occurs] * np.log((together / together.sum(0).clip(1e-300))[occurs])).sum()
    assert masking.unigram_loss(frequencies) == pytest.approx(counted, abs=5e-3)
