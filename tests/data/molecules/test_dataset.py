# SPDX-License-Identifier: Apache-2.0
"""Encoder and decoder get the configured SMILES forms; a sample depends only on its epoch and record."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.dataset import Dataset, TokenSequences
from bionemo.data.molecules.augmentation import Augmentation
from bionemo.data.molecules.infilling import TextInfilling
from tests.support.molecule_dataset import (
    CANONICAL,
    EQUIVARIANT,
    INDEPENDENT,
    INVARIANT,
    KNOWN,
    REACTIONS,
    STORED,
    TOKENIZER,
    V1,
    Make,
    canonical,
    decode_sides,
    make,
    split,
    tokenize,
)

__all__ = ["make"]


def test_dataset_implements_the_protocol(make: Make) -> None:
    samples: Dataset = make(KNOWN, EQUIVARIANT)
    assert samples.clusters is None
    assert samples.notes == ()
    assert samples.records.dtype == np.int64
    assert samples.records.tolist() == list(range(len(KNOWN)))
    assert len(samples.lengths) == len(KNOWN)
    tokens = tokenize(make(KNOWN), [3, 1], 2)
    expected = sample_keys(purpose_key(5, "dropout"), np.array([2, 2]), np.array([3, 1]))
    assert tokens.inputs.dropout_keys.tolist() == expected.tolist()


def test_ids_are_those_of_megamolbart(make: Make) -> None:
    tokens = tokenize(make(V1))
    third = [272, 272, 291, 275, 272, 281, 275, 279, 273, 274, 273, 282, 282, 282, 274, 272, 281, 272, 274, 272, 272,
             274]  # fmt: skip
    assert split(tokens.source)[2] == third
    assert split(tokens.inputs)[2] == [2, *third]
    assert split(TokenSequences(tokens.target_ids, tokens.inputs.lengths))[2] == [*third, 3]
    assert decode_sides(tokens) == (V1, V1)


def test_combinations_of_options_for_molecules(make: Make) -> None:
    assert decode_sides(tokenize(make(KNOWN))) == (KNOWN, KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, CANONICAL)))
    assert read == written == canonical(KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, EQUIVARIANT)))
    assert read == written
    assert canonical(read) == canonical(KNOWN)
    assert sum(a != b for a, b in zip(read, KNOWN, strict=True)) > 0.6 * len(KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, INVARIANT)))
    assert written == canonical(KNOWN) == canonical(read)
    assert sum(a != b for a, b in zip(read, written, strict=True)) > 0.6 * len(KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, INDEPENDENT)))
    assert canonical(read) == canonical(written) == canonical(KNOWN)
    assert sum(a != b for a, b in zip(read, written, strict=True)) > 0.6 * len(KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, replace(STORED, canonicalize_encoder_input=True))))
    assert read == written == canonical(KNOWN)
    read, written = decode_sides(tokenize(make(KNOWN, replace(STORED, decoder_independent_augment=True))))
    assert read == KNOWN != written
    assert canonical(written) == canonical(KNOWN)


def test_combinations_of_options_for_reactions(make: Make) -> None:
    products, reactants = map(list, zip(*REACTIONS, strict=True))
    sides = ("products", "reactants")
    assert decode_sides(tokenize(make(REACTIONS, field_names=sides))) == (products, reactants)
    assert decode_sides(tokenize(make(REACTIONS, field_names=sides[::-1]))) == (reactants, products)
    read, written = decode_sides(tokenize(make(REACTIONS, CANONICAL, field_names=sides)))
    assert (read, written) == (canonical(products), canonical(reactants))
    read, written = decode_sides(tokenize(make(REACTIONS, EQUIVARIANT, field_names=sides)))
    assert written == reactants
    assert read != products
    assert canonical(read) == canonical(products)
    forms = {
        tuple(decode_sides(tokenize(make(REACTIONS, INDEPENDENT, field_names=sides), epoch=epoch))[1])
        for epoch in range(9)
    }
    assert len(forms) > 5
    assert {tuple(canonical(list(form))) for form in forms} == {tuple(canonical(reactants))}
    assert {form[1].split(".")[0] in ("CCN", "NCC", "C(C)N", "C(N)C") for form in forms} == {True, False}


@pytest.mark.parametrize(
    ("forms", "random"), [(EQUIVARIANT, True), (INVARIANT, True), (CANONICAL, False), (STORED, False)]
)
def test_smiles_and_masks_change_with_the_epoch(make: Make, forms: Augmentation, random: bool) -> None:
    each = [decode_sides(tokenize(make(V1 * 10, forms), epoch=epoch))[0] for epoch in range(3)]
    assert (each[0] != each[1] != each[2]) == random
    assert (each[0][:3] != each[0][3:6]) == random  # the same molecule as another record
    still = [decode_sides(tokenize(make(V1, forms, vary_by_epoch=False), epoch=epoch)) for epoch in range(3)]
    assert still[0] == still[1] == still[2] == decode_sides(tokenize(make(V1, forms), epoch=0))
    masked = make(V1, replace(forms, encoder_mask=True), vary_by_epoch=False)
    assert decode_sides(tokenize(masked, epoch=0))[0] != decode_sides(tokenize(masked, epoch=1))[0]
    assert decode_sides(tokenize(make(V1, EQUIVARIANT, seed=6))) != decode_sides(tokenize(make(V1, EQUIVARIANT)))


@pytest.mark.parametrize("forms", [EQUIVARIANT, INVARIANT, replace(INDEPENDENT, encoder_mask=True, decoder_mask=True)])
def test_samples_do_not_depend_on_other_samples(make: Make, forms: Augmentation) -> None:
    samples = make(KNOWN, forms)
    together = tokenize(samples, epoch=4)
    order = np.random.default_rng(1).permutation(len(KNOWN))
    mixed = make(KNOWN, forms).tokenize(np.full(len(KNOWN), 4), order)
    fresh = pickle.loads(pickle.dumps(samples))
    for place, record in enumerate(order.tolist()):
        alone = tokenize(fresh, [record], epoch=4)
        for whole, number in ((together, record), (mixed, place)):
            assert split(whole.source)[number] == split(alone.source)[0]
            assert split(whole.inputs)[number] == split(alone.inputs)[0]
            assert whole.inputs.dropout_keys[number] == alone.inputs.dropout_keys[0]
    again = tokenize(samples, epoch=4)
    assert again.inputs.ids.tolist() == together.inputs.ids.tolist()


def test_only_the_selected_side_is_masked(make: Make) -> None:
    plain = tokenize(make(V1))
    for side, purpose in (("encoder_mask", "mask"), ("decoder_mask", "decoder mask")):
        samples = make(V1, replace(STORED, **{side: True}, mask_prob=0.3))
        tokens = tokenize(samples, epoch=3)
        keys = sample_keys(purpose_key(5, purpose), np.full(3, 3), np.arange(3))
        hidden = split(TextInfilling(TOKENIZER.mask_id, 0.3, 3.0)(plain.source, keys))
        assert hidden != split(plain.source)
        decode_sides(tokens)
        if side == "encoder_mask":
            assert split(tokens.source) == hidden
            assert split(tokens.inputs) == split(plain.inputs)
        else:
            assert split(tokens.source) == split(plain.source)
            assert split(tokens.inputs) == [[2, *part] for part in hidden]
            assert split(TokenSequences(tokens.target_ids, tokens.inputs.lengths)) == [[*part, 3] for part in hidden]


@pytest.mark.parametrize("seq_length", [24, 64, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_no_sample_is_longer_than_planned(make: Make, seq_length: int, masked: bool) -> None:
    for unmasked in (STORED, EQUIVARIANT, INVARIANT, CANONICAL):
        forms = replace(unmasked, encoder_mask=masked, decoder_mask=masked, mask_prob=0.5, span_lambda=0.1)
        samples = make(KNOWN, forms, seq_length=seq_length, long_sequences="truncate")
        assert samples.lengths.max() <= seq_length
        for epoch in range(4):
            tokens = tokenize(samples, epoch=epoch)
            assert (tokens.inputs.lengths <= samples.lengths[samples.records]).all()
            assert (tokens.source.lengths <= samples.lengths[samples.records]).all()


def test_planned_lengths_are_close(make: Make) -> None:
    assert make(["CCO", "C[C@@H](N)C(=O)O"]).lengths.tolist() == [4, 17]
    assert make(["CCO", "C[C@@H](N)C(=O)O"], EQUIVARIANT).lengths.tolist() == [12, 29]
    assert make(["C" * 200], EQUIVARIANT, seq_length=201).lengths.tolist() == [201]


def test_long_random_smiles_are_replaced_by_the_stored_one(make: Make) -> None:
    text = "CC1(C)CC(C)(C)C(C)(C)C1(C)C"
    room = len(TOKENIZER.encode(text))
    samples = make([text], EQUIVARIANT, seq_length=room + 1)
    forms = [decode_sides(tokenize(samples, epoch=epoch)) for epoch in range(60)]
    free = [decode_sides(tokenize(make([text], EQUIVARIANT), epoch=epoch)) for epoch in range(60)]
    gave_way = [wide != narrow for wide, narrow in zip(free, forms, strict=True)]
    assert 0 < sum(gave_way) < 60
    for wide, narrow in zip(free, forms, strict=True):
        fits = len(TOKENIZER.encode(wide[0][0])) <= room
        assert narrow == (wide if fits else ([text], [text]))


def test_surrounding_white_space_is_removed(make: Make) -> None:
    assert split(tokenize(make([" CCO ", "\u00e9"])).source) == [[272, 272, 285], [1]]


def test_a_molecule_of_white_space_is_omitted(make: Make) -> None:
    batch = tokenize(make(["CCO", "  "]))
    assert batch.inputs.lengths.tolist() == [4, 0]
    assert batch.source.lengths.tolist() == [3, 0]


def test_an_empty_batch(make: Make) -> None:
    for forms in (STORED, INVARIANT, replace(EQUIVARIANT, encoder_mask=True, decoder_mask=True)):
        tokens = tokenize(make(V1, forms), [])
        assert (
            len(tokens.inputs.ids)
            == len(tokens.source.lengths)
            == len(tokens.target_positions)
            == len(tokens.inputs.dropout_keys)
            == 0
        )
    tokens = tokenize(make(REACTIONS, INVARIANT, field_names=("products", "reactants")), [])
    assert len(tokens.inputs.lengths) == len(tokens.source.lengths) == 0


def test_fingerprint_covers_everything_that_determines_tokens(make: Make) -> None:
    one = make(V1, EQUIVARIANT).fingerprint
    assert one == make(V1, EQUIVARIANT, label="other data").fingerprint
    others = [
        make(V1, INVARIANT),
        make(V1, replace(EQUIVARIANT, mask_prob=0.2)),
        make(V1, EQUIVARIANT, seed=6),
        make(V1, EQUIVARIANT, on_invalid="skip"),
        make(V1, EQUIVARIANT, vary_by_epoch=False),
    ]
    assert all(one != other.fingerprint for other in others)
