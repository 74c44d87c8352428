# SPDX-License-Identifier: Apache-2.0
"""What is too long, no molecule or no token is met as its policy says; switches that cannot be are refused."""

from dataclasses import replace

import numpy as np
import pytest

from bionemo.common.errors import UserError
from tests.molecule_samples import (
    AS_IT_STANDS,
    CANONICAL,
    EQUIVARIANT,
    INVARIANT,
    REACTIONS,
    Make,
    both,
    build,
    canonical,
    make,
    split,
)

__all__ = ["make"]


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
    records = ["CCO", "c1cccc1", "CCN", "C1CC"]
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
    assert both(build(samples))[1][1::2] == ["c1cccc1", "C1CC"]
    with pytest.raises(UserError, match=start + ": mend them, or set model.data.on_invalid to skip or keep"):
        make(records, EQUIVARIANT, on_invalid="error")
    assert both(build(make(records, on_invalid="error")))[0] == records  # where RDKit is not needed


def test_what_the_look_at_the_start_has_missed_is_met_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bionemo.data.molecules.reader._PARSED", 1)
    monkeypatch.setattr("bionemo.data.molecules.reader._TOKENISED", 1)
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
