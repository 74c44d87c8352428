# SPDX-License-Identifier: Apache-2.0
"""Encoder and decoder get the forms that the switches say, each sample by its epoch and record alone."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from rdkit import Chem

from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.dataset import Samples, Sequences
from bionemo.data.molecules.augmentation import Forms
from bionemo.data.molecules.infilling import Infilling
from tests.molecule_samples import (
    AS_IT_STANDS,
    CANONICAL,
    EQUIVARIANT,
    INDEPENDENT,
    INVARIANT,
    KNOWN,
    REACTIONS,
    TOKENIZER,
    V1,
    Make,
    both,
    build,
    canonical,
    make,
    split,
)

__all__ = ["make"]


def test_samples_are_what_the_interface_says(make: Make) -> None:
    samples: Samples = make(KNOWN, EQUIVARIANT)
    assert samples.clusters is None
    assert samples.notices == ()
    assert samples.records.dtype == np.int64
    assert samples.records.tolist() == list(range(len(KNOWN)))
    assert len(samples.lengths) == len(KNOWN)
    tokens = build(make(KNOWN), [3, 1], 2)
    expected = sample_keys(purpose_key(5, "dropout"), np.array([2, 2]), np.array([3, 1]))
    assert tokens.keys.tolist() == expected.tolist()


def test_as_it_stands_ids_are_those_of_megamolbart(make: Make) -> None:
    tokens = build(make(V1))
    third = [272, 272, 291, 275, 272, 281, 275, 279, 273, 274, 273, 282, 282, 282, 274, 272, 281, 272, 274, 272, 272,
             274]  # fmt: skip
    assert split(tokens.source)[2] == third
    assert split(tokens.inputs)[2] == [2, *third]
    assert split(Sequences(tokens.target_ids, tokens.inputs.lengths))[2] == [*third, 3]
    assert both(tokens) == (V1, V1)


def test_combinations_of_switches_for_molecules(make: Make) -> None:
    assert both(build(make(KNOWN))) == (KNOWN, KNOWN)
    read, written = both(build(make(KNOWN, CANONICAL)))
    assert read == written == canonical(KNOWN)
    read, written = both(build(make(KNOWN, EQUIVARIANT)))
    assert read == written
    assert canonical(read) == canonical(KNOWN)
    assert sum(a != b for a, b in zip(read, KNOWN, strict=True)) > 0.6 * len(KNOWN)
    read, written = both(build(make(KNOWN, INVARIANT)))
    assert written == canonical(KNOWN) == canonical(read)
    assert sum(a != b for a, b in zip(read, written, strict=True)) > 0.6 * len(KNOWN)
    read, written = both(build(make(KNOWN, INDEPENDENT)))
    assert canonical(read) == canonical(written) == canonical(KNOWN)
    assert sum(a != b for a, b in zip(read, written, strict=True)) > 0.6 * len(KNOWN)
    read, written = both(build(make(KNOWN, replace(AS_IT_STANDS, canonicalize_encoder_input=True))))
    assert read == written == canonical(KNOWN)
    read, written = both(build(make(KNOWN, replace(AS_IT_STANDS, decoder_independent_augment=True))))
    assert read == KNOWN != written
    assert canonical(written) == canonical(KNOWN)


def test_combinations_of_switches_for_reactions(make: Make) -> None:
    products, reactants = map(list, zip(*REACTIONS, strict=True))
    sides = ("products", "reactants")
    assert both(build(make(REACTIONS, sides=sides))) == (products, reactants)
    assert both(build(make(REACTIONS, sides=sides[::-1]))) == (reactants, products)
    read, written = both(build(make(REACTIONS, CANONICAL, sides=sides)))
    assert (read, written) == (canonical(products), canonical(reactants))
    read, written = both(build(make(REACTIONS, EQUIVARIANT, sides=sides)))
    assert written == reactants
    assert read != products
    assert canonical(read) == canonical(products)
    forms = {tuple(both(build(make(REACTIONS, INDEPENDENT, sides=sides), epoch=epoch))[1]) for epoch in range(9)}
    assert len(forms) > 5
    assert {tuple(canonical(list(form))) for form in forms} == {tuple(canonical(reactants))}
    assert {form[1].split(".")[0] in ("CCN", "NCC", "C(C)N", "C(N)C") for form in forms} == {True, False}


@pytest.mark.parametrize(
    ("forms", "random"), [(EQUIVARIANT, True), (INVARIANT, True), (CANONICAL, False), (AS_IT_STANDS, False)]
)
def test_forms_and_masks_of_epochs(make: Make, forms: Forms, random: bool) -> None:
    each = [both(build(make(V1 * 10, forms), epoch=epoch))[0] for epoch in range(3)]
    assert (each[0] != each[1] != each[2]) == random
    assert (each[0][:3] != each[0][3:6]) == random  # the same molecule in another record
    still = [both(build(make(V1, forms, random_forms=False), epoch=epoch)) for epoch in range(3)]
    assert still[0] == still[1] == still[2] == both(build(make(V1, forms), epoch=0))
    masked = make(V1, replace(forms, encoder_mask=True), random_forms=False)
    assert both(build(masked, epoch=0))[0] != both(build(masked, epoch=1))[0]
    assert both(build(make(V1, EQUIVARIANT, seed=6))) != both(build(make(V1, EQUIVARIANT)))


@pytest.mark.parametrize("forms", [EQUIVARIANT, INVARIANT, replace(INDEPENDENT, encoder_mask=True, decoder_mask=True)])
def test_a_sample_does_not_depend_on_the_company(make: Make, forms: Forms) -> None:
    samples = make(KNOWN, forms)
    together = build(samples, epoch=4)
    order = np.random.default_rng(1).permutation(len(KNOWN))
    mixed = make(KNOWN, forms).build(np.full(len(KNOWN), 4), order)
    fresh = pickle.loads(pickle.dumps(samples))
    for place, record in enumerate(order.tolist()):
        alone = build(fresh, [record], epoch=4)
        for whole, number in ((together, record), (mixed, place)):
            assert split(whole.source)[number] == split(alone.source)[0]
            assert split(whole.inputs)[number] == split(alone.inputs)[0]
            assert whole.keys[number] == alone.keys[0]
    again = build(samples, epoch=4)
    assert again.inputs.ids.tolist() == together.inputs.ids.tolist()


def test_masks_hide_spans_of_the_side_asked_for(make: Make) -> None:
    plain = build(make(V1))
    for side, purpose in (("encoder_mask", "mask"), ("decoder_mask", "decoder mask")):
        samples = make(V1, replace(AS_IT_STANDS, **{side: True}, mask_prob=0.3))
        tokens = build(samples, epoch=3)
        keys = sample_keys(purpose_key(5, purpose), np.full(3, 3), np.arange(3))
        hidden = split(Infilling(TOKENIZER.mask_id, 0.3, 3.0)(plain.source, keys))
        assert hidden != split(plain.source)
        both(tokens)
        if side == "encoder_mask":
            assert split(tokens.source) == hidden
            assert split(tokens.inputs) == split(plain.inputs)
        else:
            assert split(tokens.source) == split(plain.source)
            assert split(tokens.inputs) == [[2, *part] for part in hidden]
            assert split(Sequences(tokens.target_ids, tokens.inputs.lengths)) == [[*part, 3] for part in hidden]


@pytest.mark.parametrize("seq_length", [24, 64, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_no_sample_is_longer_than_planned(make: Make, seq_length: int, masked: bool) -> None:
    for unmasked in (AS_IT_STANDS, EQUIVARIANT, INVARIANT, CANONICAL):
        forms = replace(unmasked, encoder_mask=masked, decoder_mask=masked, mask_prob=0.5, span_lambda=0.1)
        samples = make(KNOWN, forms, seq_length=seq_length, long_sequences="truncate")
        assert samples.lengths.max() <= seq_length
        for epoch in range(4):
            tokens = build(samples, epoch=epoch)
            assert (tokens.inputs.lengths <= samples.lengths[samples.records]).all()
            assert (tokens.source.lengths <= samples.lengths[samples.records]).all()


def test_planned_lengths_are_close(make: Make) -> None:
    assert make(["CCO", "C[C@@H](N)C(=O)O"]).lengths.tolist() == [4, 17]
    assert make(["CCO", "C[C@@H](N)C(=O)O"], EQUIVARIANT).lengths.tolist() == [12, 29]
    assert make(["C" * 200], EQUIVARIANT, seq_length=201).lengths.tolist() == [201]


def test_a_form_too_long_gives_way_to_the_stored_one(make: Make) -> None:
    text = "CC1(C)CC(C)(C)C(C)(C)C1(C)C"
    room = len(TOKENIZER.encode(text))
    samples = make([text], EQUIVARIANT, seq_length=room + 1)
    forms = [both(build(samples, epoch=epoch)) for epoch in range(60)]
    free = [both(build(make([text], EQUIVARIANT), epoch=epoch)) for epoch in range(60)]
    gave_way = [wide != narrow for wide, narrow in zip(free, forms, strict=True)]
    assert 0 < sum(gave_way) < 60
    for wide, narrow in zip(free, forms, strict=True):
        fits = len(TOKENIZER.encode(wide[0][0])) <= room
        assert narrow == (wide if fits else ([text], [text]))


def test_space_around_a_smiles_is_no_part_of_it(make: Make) -> None:
    assert split(build(make([" CCO ", "\u00e9"])).source) == [[272, 272, 285], [1]]


def test_an_empty_batch(make: Make) -> None:
    for forms in (AS_IT_STANDS, INVARIANT, replace(EQUIVARIANT, encoder_mask=True, decoder_mask=True)):
        tokens = build(make(V1, forms), [])
        assert (
            len(tokens.inputs.ids) == len(tokens.source.lengths) == len(tokens.target_index) == len(tokens.keys) == 0
        )
    tokens = build(make(REACTIONS, INVARIANT, sides=("products", "reactants")), [])
    assert len(tokens.inputs.lengths) == len(tokens.source.lengths) == 0


def test_targets_to_compare_with(make: Make) -> None:
    records = ["OCC", "c1cccc1", "C1=CC=CC=C1"]
    numbers = np.array([2, 0, 1])
    assert make(records).targets(numbers) == ["C1=CC=CC=C1", "OCC", "c1cccc1"]
    forms = replace(AS_IT_STANDS, canonicalize_target_smile=True)
    assert make(records, forms).targets(numbers) == ["c1ccccc1", "CCO", "c1cccc1"]
    reactions = make(REACTIONS, forms, sides=("products", "reactants"))
    assert reactions.targets(np.array([1])) == [Chem.CanonSmiles(REACTIONS[1][1])]


def test_identity_is_what_decides_tokens(make: Make) -> None:
    one = make(V1, EQUIVARIANT).identity
    assert one == make(V1, EQUIVARIANT, where="other data").identity
    assert one == make(V1, replace(EQUIVARIANT, canonicalize_target_smile=True)).identity
    others = [
        make(V1, INVARIANT),
        make(V1, replace(EQUIVARIANT, mask_prob=0.2)),
        make(V1, EQUIVARIANT, seed=6),
        make(V1, EQUIVARIANT, on_invalid="skip"),
        make(V1, EQUIVARIANT, random_forms=False),
    ]
    assert all(one != other.identity for other in others)
