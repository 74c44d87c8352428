# SPDX-License-Identifier: Apache-2.0
"""Policies for long, invalid and unknown SMILES; contradictory options are rejected."""

from dataclasses import replace

import pytest

from bionemo.common.errors import UserError
from tests.support.molecule_dataset import (
    CANONICAL,
    EQUIVARIANT,
    INVARIANT,
    REACTIONS,
    STORED,
    TOKENIZER,
    Make,
    canonical,
    decode_sides,
    make,
    split,
    tokenize,
)

__all__ = ["make"]


def test_long_smiles_are_truncated_dropped_or_rejected(make: Make) -> None:
    records = ["CCO", "C" * 30, "[C@@H](F)(Cl)CCCC", "N" * 10]  # bytes 3, 30, 17, 10; tokens 3, 30, 11, 10
    samples = make(records, seq_length=12, long_sequences="truncate")
    assert samples.notes == ("train data: 1 of 4 SMILES (25.0%) are longer than 11 tokens and are truncated",)
    assert decode_sides(tokenize(samples))[0] == ["CCO", "C" * 11, records[2], "N" * 10]
    assert samples.lengths.tolist() == [4, 12, 12, 11]
    samples = make(records, seq_length=12, long_sequences="drop")
    assert samples.records.tolist() == [0, 2, 3]
    assert samples.notes == ("train data: 1 of 4 SMILES (25.0%) are longer than 11 tokens and are dropped",)
    with pytest.raises(
        UserError, match=r"train data: 1 of 4 .* \(the first is record 1 with 30\): raise model.seq_len"
    ):
        make(records, seq_length=12, long_sequences="error")
    with pytest.raises(UserError, match=r"all \d SMILES are longer than 2 tokens and are dropped"):
        make(records, seq_length=3, long_sequences="drop")
    assert make(records, seq_length=31, long_sequences="error").notes == ()
    reactions = [("CCO", "C" * 30), ("N" * 30, "C"), ("C", "N")]
    samples = make(reactions, seq_length=12, long_sequences="drop", field_names=("products", "reactants"))
    assert samples.records.tolist() == [2]
    assert samples.lengths.tolist() == [12, 12, 2]


def test_smiles_that_would_crash_rdkit_are_truncated_and_not_rewritten(make: Make) -> None:
    records = ["CCO", "C" * 200_000, "c1cccc1" + "C" * 200]
    samples = make(records, INVARIANT, long_sequences="truncate")
    read, written = decode_sides(tokenize(samples))
    assert read[1:] == written[1:] == [records[1][:127], records[2][:127]]
    reactions = make(
        [("OCC", "C" * 200_000)], CANONICAL, field_names=("products", "reactants"), long_sequences="truncate"
    )
    assert decode_sides(tokenize(reactions)) == (["OCC"], ["C" * 127])


def test_policies_for_molecules_that_rdkit_rejects(make: Make) -> None:
    records = ["CCO", "c1cccc1", "CCN", "C1CC"]
    start = r"train data: RDKit cannot read 2 of 4 SMILES \(the first is record 1, 'c1cccc1'\)"
    samples = make(records, EQUIVARIANT, on_invalid="skip")
    assert samples.notes == (start.replace("\\", "") + "; their records are dropped",)
    tokens = tokenize(samples, epoch=1)
    assert tokens.inputs.lengths.tolist() == [4, 0, 4, 0]
    assert tokens.source.lengths.tolist() == [3, 0, 3, 0]
    assert len(tokens.inputs.dropout_keys) == len(tokens.unknown_counts) == 4
    assert canonical(decode_sides(tokens)[0]) == ["CCO", "", "CCN", ""]
    samples = make(records, EQUIVARIANT, on_invalid="keep")
    assert samples.notes == (start.replace("\\", "") + "; they are used unchanged",)
    assert decode_sides(tokenize(samples))[1][1::2] == ["c1cccc1", "C1CC"]
    with pytest.raises(UserError, match=start + ": correct them, or set model.data.on_invalid to skip or keep"):
        make(records, EQUIVARIANT, on_invalid="error")
    assert decode_sides(tokenize(make(records, on_invalid="error")))[0] == records  # without need for RDKit


def test_records_outside_the_initial_sample_are_checked_when_tokenized(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("content_checks", "dataset"):
        monkeypatch.setattr(f"bionemo.data.molecules.{module}.SAMPLED_MOLECULES", 1)
    records = ["CCO", "c1cccc1", "C[Zr]"]
    samples = make(records, EQUIVARIANT, on_unknown="error")
    assert samples.notes == ()
    with pytest.raises(
        UserError, match=r"train data: record 1 \('c1cccc1'\) cannot be read by RDKit: correct it, or set"
    ):
        tokenize(samples)
    with pytest.raises(UserError, match=r"record 2 \('.*\[Zr\].*'\) has tokens outside the vocabulary: .*on_unknown"):
        tokenize(samples, [0, 2])


def test_reactions_with_one_invalid_side(make: Make) -> None:
    reactions = [("CCO", "CCN"), ("c1cccc1", "C"), ("C", "c1cccc1")]
    sides = ("products", "reactants")
    samples = make(reactions, CANONICAL, field_names=sides, on_invalid="skip")
    assert tokenize(samples).inputs.lengths.tolist() == [4, 0, 0]
    assert "RDKit cannot read 2 of 6 SMILES" in samples.notes[0]
    only_read = replace(STORED, canonicalize_encoder_input=True)
    samples = make(reactions, only_read, field_names=sides, on_invalid="skip")
    assert tokenize(samples).inputs.lengths.tolist() == [4, 0, 8]
    assert "RDKit cannot read 1 of 3 SMILES" in samples.notes[0]
    samples = make(reactions, CANONICAL, field_names=sides, on_invalid="keep")
    assert decode_sides(tokenize(samples)) == (["CCO", "c1cccc1", "C"], ["CCN", "C", "c1cccc1"])


def test_tokens_outside_the_vocabulary(make: Make) -> None:
    records = ["CCO", "C[Zr]C[Zr]", "C^N", "CCN"]
    samples = make(records)
    start = "train data: 3 tokens in 2 of 4 records are outside the vocabulary"
    assert samples.notes == (f"{start} and become unknown ('[Zr]', '^')",)
    tokens = tokenize(samples)
    assert tokens.unknown_counts.tolist() == [0, 2, 1, 0]
    assert split(tokens.source)[1:3] == [[272, 1, 272, 1], [272, 1, 279]]
    samples = make(records, on_unknown="skip")
    assert samples.notes == (f"{start} and their records are dropped ('[Zr]', '^')",)
    assert tokenize(samples).inputs.lengths.tolist() == [4, 0, 0, 4]
    with pytest.raises(
        UserError, match=r"vocabulary \('\[Zr\]', '\^'\): correct them, or set model.data.on_unknown to s"
    ):
        make(records, on_unknown="error")
    reactions = make([("[Zr]", "C[Zr]"), ("C", "C")], field_names=("products", "reactants"))
    assert tokenize(reactions).unknown_counts.tolist() == [2, 0]
    assert reactions.notes[0].startswith("train data: 2 tokens in 1 of 2 records")


def test_unknown_tokens_are_those_of_the_form_that_is_read(make: Make) -> None:
    """RDKit writes [H] as the number of hydrogen atoms, and brackets at metals."""
    records = ["[H]OCC", "C[Si]([H])([H])[H]", "[Mg+]c1ccccc1"]
    assert [TOKENIZER.find_unknown(text) for text in records] == [["[H]"], ["[H]"] * 3, []]
    samples = make(records, CANONICAL)
    note = "train data: 2 tokens in 1 of 3 records are outside the vocabulary and become unknown ('[SiH3]')"
    assert samples.notes == (note,)
    assert tokenize(samples).unknown_counts.tolist() == [0, 2, 0]
    with pytest.raises(UserError, match=r"1 of 3 records are outside the vocabulary \('\[SiH3\]'\): correct"):
        make(records, CANONICAL, on_unknown="error")
    with pytest.raises(UserError, match=r"record 1 \('C\[SiH3\]'\) has tokens outside the vocabulary"):
        samples._on_unknown = "error"
        tokenize(samples)
    assert make([records[0], records[2]], INVARIANT, on_unknown="error").notes == ()


def test_masked_tokens_count_as_unknown(make: Make) -> None:
    samples = make(["[Zr]" * 20], replace(STORED, encoder_mask=True, mask_prob=1.0))
    assert tokenize(samples).unknown_counts.tolist() == [20]


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
def test_contradictory_options(switches: tuple[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        replace(STORED, **dict.fromkeys(switches, True))


def test_missing_field(make: Make) -> None:
    with pytest.raises(
        UserError, match=r"no field 'product', only products, reactants: name the fields of model.data.in"
    ):
        make(REACTIONS, field_names=("product", "reactants"))
