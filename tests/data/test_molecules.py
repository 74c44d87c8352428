# SPDX-License-Identifier: Apache-2.0
"""Encoder and decoder get the forms that the switches say, each sample by its epoch and record alone."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem

from bionemo.data.infilling import Infilling
from bionemo.data.molecule_forms import Forms
from bionemo.data.molecules import MoleculeSamples
from bionemo.data.random_stream import purpose_key, sample_keys
from bionemo.data.samples import Samples, Sequences, Tokens
from bionemo.data.source import open_source
from bionemo.errors import UserError
from bionemo.tokenizers import load_tokenizer
from tests.molecules import MOLECULES

TOKENIZER = load_tokenizer("megamolbart")
AS_IT_STANDS = Forms(False, False, False, False, False, False, False, 0.1, 3.0)
EQUIVARIANT = replace(AS_IT_STANDS, encoder_augment=True)
INVARIANT = replace(EQUIVARIANT, canonicalize_decoder_output=True)
CANONICAL = replace(AS_IT_STANDS, canonicalize_encoder_input=True, canonicalize_decoder_output=True)
INDEPENDENT = replace(EQUIVARIANT, decoder_independent_augment=True)
KNOWN = [text for text in MOLECULES if not TOKENIZER.unknown(text)]
V1 = ["CO[C@H](C[C@@H]1CCC[C@H]1O)c1ccccc1", "COC[C@H](O)CCNC(=O)CCC[C@@H](C)N", "CC[C@](C)(Nc1cnnn1C)C1CC1"]
REACTIONS = [
    ("CCc1cc(N)c(N)cc1Cl", "CCc1cc([N+](=O)[O-])c(N)cc1Cl"),
    ("CC(=O)NCC", "CC(=O)OC(C)=O.CCN"),
    ("OCC", "C1CO1.Cl"),
]

Make = Callable[..., MoleculeSamples]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write records into a file and open it as samples."""

    def build(records: list[Any], forms: Forms = AS_IT_STANDS, **changes: Any) -> MoleculeSamples:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        if isinstance(records[0], tuple):
            path.write_text("id,reactants,products\n" + "".join(f"{i},{b},{a}\n" for i, (a, b) in enumerate(records)))
            source = open_source("csv_fields_mmap", [path], data_fields={"products": 2, "reactants": 1})
        else:
            path.write_text("id\tsmiles\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(records)))
            source = open_source("csv_mmap", [path], data_col=1, data_sep="\t")
        options = {"seed": 5, "seq_length": 128, "long_sequences": "error", "on_invalid": "error",
                   "on_unknown": "keep", "random_forms": True, "where": "train data"}  # fmt: skip
        return MoleculeSamples(source, TOKENIZER, forms, **{**options, **changes})

    return build


def build(samples: MoleculeSamples, records: list[int] | None = None, epoch: int = 0) -> Tokens:
    numbers = samples.records if records is None else np.array(records, np.int64)
    return samples.build(np.full_like(numbers, epoch), numbers)


def split(sequences: Sequences) -> list[list[int]]:
    return [part.tolist() for part in np.split(sequences.ids, sequences.lengths.cumsum())[:-1]]


def both(tokens: Tokens) -> tuple[list[str], list[str]]:
    """SMILES that the encoders read and that the decoders are to write; also look at how tokens are laid out."""
    assert tokens.source is not None
    assert tokens.inputs.ids.dtype == tokens.source.ids.dtype == tokens.target_ids.dtype == np.uint16
    assert tokens.inputs.lengths.dtype == tokens.target_index.dtype == tokens.unknown.dtype == np.int64
    assert tokens.target_index.tolist() == list(range(len(tokens.inputs.ids)))
    answers = split(Sequences(tokens.target_ids, tokens.inputs.lengths))
    for inputs, answer in zip(split(tokens.inputs), answers, strict=True):
        if inputs:
            assert (inputs[0], answer[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
            assert inputs[1:] == answer[:-1]
    return [TOKENIZER.decode(np.array(part, np.int64)) for part in split(tokens.source)], [
        TOKENIZER.text(np.array(part)) for part in answers
    ]


def canonical(texts: list[str]) -> list[str]:
    return [Chem.CanonSmiles(text) for text in texts]


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


def test_long_smiles_are_cut_left_out_or_refused(make: Make) -> None:
    records = ["CCO", "C" * 30, "[C@@H](F)(Cl)CCCC", "N" * 10]  # bytes 3, 30, 17, 10; tokens 3, 30, 11, 10
    samples = make(records, seq_length=12, long_sequences="truncate")
    assert samples.notices == ("train data: 1 of 4 SMILES (25.0%) are longer than 11 tokens and are cut at their end",)
    assert both(build(samples))[0] == ["CCO", "C" * 11, records[2], "N" * 10]
    assert samples.lengths.tolist() == [4, 12, 12, 11]
    samples = make(records, seq_length=12, long_sequences="drop")
    assert samples.records.tolist() == [0, 2, 3]
    assert samples.notices == ("train data: 1 of 4 SMILES (25.0%) are longer than 11 tokens and are left out",)
    with pytest.raises(
        UserError, match=r"train data: 1 of 4 .* \(the first is record 1 with 30\): raise model.seq_len"
    ):
        make(records, seq_length=12, long_sequences="error")
    with pytest.raises(UserError, match="no SMILES of at most 2 tokens is left"):
        make(records, seq_length=3, long_sequences="drop")
    assert make(records, seq_length=31, long_sequences="error").notices == ()
    reactions = [("CCO", "C" * 30), ("N" * 30, "C"), ("C", "N")]
    samples = make(reactions, seq_length=12, long_sequences="drop", sides=("products", "reactants"))
    assert samples.records.tolist() == [2]
    assert samples.lengths.tolist() == [12, 12, 2]


def test_what_would_end_the_process_is_cut_and_not_rewritten(make: Make) -> None:
    records = ["CCO", "C" * 200_000, "c1cccc1" + "C" * 200]
    samples = make(records, replace(INVARIANT, canonicalize_target_smile=True), long_sequences="truncate")
    read, written = both(build(samples))
    assert read[1:] == written[1:] == [records[1][:127], records[2][:127]]
    assert samples.targets(np.arange(3)) == records
    reactions = make([("OCC", "C" * 200_000)], CANONICAL, sides=("products", "reactants"), long_sequences="truncate")
    assert both(build(reactions)) == (["OCC"], ["C" * 127])


def test_molecules_that_rdkit_refuses(make: Make) -> None:
    records = ["CCO", "c1cccc1", "CCN", ""]
    start = r"train data: RDKit cannot read 2 of 4 SMILES \(the first is record 1, 'c1cccc1'\)"
    samples = make(records, EQUIVARIANT, on_invalid="skip")
    assert samples.notices == (start.replace("\\", "") + "; their records are left out",)
    tokens = build(samples, epoch=1)
    assert tokens.inputs.lengths.tolist() == [4, 0, 4, 0]
    assert tokens.source.lengths.tolist() == [3, 0, 3, 0]
    assert len(tokens.keys) == len(tokens.unknown) == 4
    assert canonical(both(tokens)[0]) == ["CCO", "", "CCN", ""]
    samples = make(records, EQUIVARIANT, on_invalid="keep")
    assert samples.notices == (start.replace("\\", "") + "; they are taken as they stand",)
    assert both(build(samples))[1][1::2] == ["c1cccc1", ""]
    with pytest.raises(UserError, match=start + ": mend them, or set model.data.on_invalid to skip or keep"):
        make(records, EQUIVARIANT, on_invalid="error")
    assert both(build(make(records, on_invalid="error")))[0] == records  # where RDKit is not needed


def test_what_the_look_at_the_start_has_missed_is_met_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bionemo.data.molecule_texts._PARSED", 1)
    monkeypatch.setattr("bionemo.data.molecule_texts._TOKENISED", 1)
    records = ["CCO", "c1cccc1", "C[Zr]"]
    samples = make(records, EQUIVARIANT, on_unknown="error")
    assert samples.notices == ()
    with pytest.raises(
        UserError, match=r"train data: record 1 \('c1cccc1'\) cannot be read by RDKit: mend it, or set"
    ):
        build(samples)
    with pytest.raises(UserError, match=r"record 2 \('C\[Zr\]'\) has tokens outside the vocabulary: .*on_unknown"):
        build(samples, [0, 2])


def test_one_bad_side_of_a_reaction_is_enough(make: Make) -> None:
    reactions = [("CCO", "CCN"), ("c1cccc1", "C"), ("C", "c1cccc1")]
    sides = ("products", "reactants")
    samples = make(reactions, CANONICAL, sides=sides, on_invalid="skip")
    assert build(samples).inputs.lengths.tolist() == [4, 0, 0]
    assert "RDKit cannot read 2 of 6 SMILES" in samples.notices[0]
    only_read = replace(AS_IT_STANDS, canonicalize_encoder_input=True)
    samples = make(reactions, only_read, sides=sides, on_invalid="skip")
    assert build(samples).inputs.lengths.tolist() == [4, 0, 8]
    assert "RDKit cannot read 1 of 3 SMILES" in samples.notices[0]
    samples = make(reactions, CANONICAL, sides=sides, on_invalid="keep")
    assert both(build(samples)) == (["CCO", "c1cccc1", "C"], ["CCN", "C", "c1cccc1"])


def test_tokens_outside_the_vocabulary(make: Make) -> None:
    records = ["CCO", "C[Zr]C[Zr]", "C^N", "CCN"]
    samples = make(records)
    start = "train data: 3 tokens in 2 of 4 records are outside the vocabulary"
    assert samples.notices == (f"{start} and count as unknown ('[Zr]', '^')",)
    tokens = build(samples)
    assert tokens.unknown.tolist() == [0, 2, 1, 0]
    assert split(tokens.source)[1:3] == [[272, 1, 272, 1], [272, 1, 279]]
    samples = make(records, on_unknown="skip")
    assert samples.notices == (f"{start} and their records are left out ('[Zr]', '^')",)
    assert build(samples).inputs.lengths.tolist() == [4, 0, 0, 4]
    with pytest.raises(
        UserError, match=r"vocabulary \('\[Zr\]', '\^'\): mend them, or set model.data.on_unknown to s"
    ):
        make(records, on_unknown="error")
    reactions = make([("[Zr]", "C[Zr]"), ("C", "C")], sides=("products", "reactants"))
    assert build(reactions).unknown.tolist() == [2, 0]
    assert reactions.notices[0].startswith("train data: 2 tokens in 1 of 2 records")


def test_hidden_tokens_count_as_unknown_too(make: Make) -> None:
    samples = make(["[Zr]" * 20], replace(AS_IT_STANDS, encoder_mask=True, mask_prob=1.0))
    assert build(samples).unknown.tolist() == [20]


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


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        (
            ("encoder_augment", "canonicalize_encoder_input"),
            r"model.data.encoder_augment and model.data.canonicalize_e",
        ),
        (
            ("decoder_independent_augment", "canonicalize_decoder_output"),
            r"model.data.decoder_independent_augment and",
        ),
    ],
)
def test_switches_that_contradict_each_other(switches: tuple[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        replace(AS_IT_STANDS, **dict.fromkeys(switches, True))


@pytest.mark.parametrize("changes", [{"mask_prob": 1.1}, {"mask_prob": -0.1}, {"span_lambda": -1.0},
                                     {"span_lambda": float("nan")}, {"mask_prob": float("nan")}])  # fmt: skip
def test_shares_that_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"model.data.{next(iter(changes))}=.*give"):
        replace(AS_IT_STANDS, **changes)


def test_a_side_that_is_not_there(make: Make) -> None:
    with pytest.raises(
        UserError, match=r"no field 'product', only products, reactants: name the fields of model.data.in"
    ):
        make(REACTIONS, sides=("product", "reactants"))


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
