# SPDX-License-Identifier: Apache-2.0
"""Division of a table: by a column, at random by groups of equal sequences and by class, by scaffold."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rdkit import Chem

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.finetuning.splits import divide_at_random
from bionemo.finetuning.task_data import TaskData, read_splits
from bionemo.tokenizers import SmilesTokenizer, Vocabulary, load_tokenizer
from tests.finetuning.tables import peptides, write

SPLITS = ("train", "val", "test")


def read(path: Path, task_type: str, *more: str, vocabulary: Vocabulary | None = None) -> TaskData:
    column = "smiles" if vocabulary else "sequence"
    given = [f"model.data.dataset_path={path}", "model.data.task_name=x", f"model.data.task_type={task_type}",
             "model.data.target_column=label", f"model.data.sequence_column={column}", *more]  # fmt: skip
    return read_splits(load("downstream_table", given, schema=DownstreamConfig).model.data, "k", SPLITS, vocabulary)


@pytest.fixture(scope="module")
def smiles() -> SmilesTokenizer:
    cfg: Any = load("pretrain_xsmall_span_aug", [], Path("examples/molecule/megamolbart/conf"))
    vocabulary = load_tokenizer("megamolbart", cfg.model.tokenizer)
    assert isinstance(vocabulary, SmilesTokenizer)
    return vocabulary


def sizes(data: TaskData) -> list[int]:
    return [len(data.splits[name].texts) for name in SPLITS]


def test_equal_sequences_are_in_one_split() -> None:
    texts, labels = [f"M{number % 100}" for number in range(200)], [""] * 200
    found = divide_at_random(texts, texts, labels, "x.csv")
    assert Counter(found) == {"train": 160, "val": 20, "test": 20}
    assert found[:100] == found[100:]
    backwards = divide_at_random(texts[::-1], texts[::-1], labels, "x.csv")
    assert backwards[::-1] == found  # the order does not matter
    other = [f"{text} of another version of RDKit" for text in texts]
    assert divide_at_random(texts, other, labels, "x.csv") == found
    with pytest.raises(UserError, match=r"x.csv has 9 different sequences: give 10 or more"):
        divide_at_random(texts[:9], texts[:9], labels[:9], "x.csv")


def test_spellings_of_a_protein_are_in_one_split(tmp_path: Path) -> None:
    texts = peptides(40)
    spellings = [texts, [text.lower() for text in texts], [f"{text}*" for text in texts], [" ".join(t) for t in texts]]
    rows = [(text, n / 7) for n, text in enumerate(text for part in spellings for text in part)]
    data = read(write(tmp_path / "x.csv", "sequence,label", rows), "regression")
    assert sizes(data) == [128, 16, 16]
    found = [{text.replace(" ", "").strip("*").upper() for text in data.splits[name].texts} for name in SPLITS]
    assert [len(each) for each in found] == [32, 4, 4] and len(set.union(*found)) == 40


def test_spellings_of_a_molecule_are_in_one_split(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    texts = [f"{'C' * n}O" for n in range(1, 31)]
    rows = [(text, n / 7) for n, text in enumerate([*texts, *(text[::-1] for text in texts)])]
    data = read(write(tmp_path / "x.csv", "smiles,label", rows), "regression", vocabulary=smiles)
    assert sizes(data) == [48, 6, 6]
    found = [{Chem.CanonSmiles(text) for text in data.splits[name].texts} for name in SPLITS]
    assert sum(map(len, found)) == len(set.union(*found)) == 30


def test_classes_are_divided_alike(tmp_path: Path) -> None:
    """15 of 400 rows are of the rare class, as in HIV; contradictory labels of a sequence are in one split."""
    texts = peptides(400)
    rows = [(text, int(n < 15)) for n, text in enumerate(texts)]
    rows += [(texts[0], 0)]
    data = read(write(tmp_path / "x.csv", "sequence,label", rows), "classification")
    counts = [Counter(int(each) for each in data.splits[name].targets) for name in SPLITS]
    rare = next(number for number, name in enumerate(data.classes) if name == "1")
    assert all(each[rare] in (1, 2) for each in counts[1:])
    assert sum(each.total() for each in counts) == 401
    assert [each.total() for each in counts[1:]] in ([40, 40], [41, 40], [40, 41])
    owners = [name for name in SPLITS if texts[0] in data.splits[name].texts]
    assert len(owners) == 1


def test_classes_that_are_too_small(tmp_path: Path) -> None:
    rows = [(text, f"class {n % 10}") for n, text in enumerate(peptides(40))]
    with pytest.raises(UserError, match=r"x\.csv: no class has 5 different sequences"):
        read(write(tmp_path / "x.csv", "sequence,label", rows), "classification")


NAMES = {
    "train": ["train", "Train", "training"],
    "val": ["val", "valid", "VALIDATION", "dev"],
    "test": ["test", "TEST"],
}


@pytest.mark.parametrize("column", ["split", "Set", "scaffold_split", "anything"])
def test_a_column_of_splits_is_used(column: str, tmp_path: Path) -> None:
    wanted = [SPLITS[n % 3] for n in range(36)]
    rows = [
        (text, n / 7, NAMES[name][n // 3 % len(NAMES[name])])
        for n, (text, name) in enumerate(zip(peptides(36), wanted, strict=True))
    ]
    rows.append((peptides(37)[-1], 1, ""))
    data = read(write(tmp_path / "x.csv", f"sequence,label,{column}", rows), "regression")
    for name in SPLITS:
        assert data.splits[name].texts == [row[0] for row, each in zip(rows, wanted, strict=False) if each == name]
    (note,) = data.notes
    assert note.endswith(
        f"column {column!r} divides the rows: 12 train, 12 val, 12 test; 1 without a split are left out"
    )


def test_columns_of_flip(tmp_path: Path) -> None:
    cells = ["train,False", "train,True", "test,False", "train,"]
    rows = [(text, n / 7, cells[n % 4]) for n, text in enumerate(peptides(40))]
    data = read(write(tmp_path / "x.csv", "sequence,label,set,validation", rows), "regression")
    assert sizes(data) == [20, 10, 10]


def test_a_missing_split_is_drawn_from_the_training_rows(tmp_path: Path) -> None:
    rows = [(text, n / 7, "test" if n % 4 == 0 else "train") for n, text in enumerate(peptides(80))]
    data = read(write(tmp_path / "x.csv", "sequence,label,split", rows), "regression")
    assert sizes(data) == [54, 6, 20]
    assert data.splits["test"].texts == [row[0] for row in rows[::4]]
    assert "a tenth of the training rows is used as val" in data.notes[1]


@pytest.mark.parametrize(
    ("column", "cells", "more", "message"),
    [
        ("fold", ["0", "1", "2"], (), "column 'fold' is not used: its cells are not train, val and test"),
        ("split", ["train", "test", "x"], (), "column 'split' is not used: its cells are not train, val and test"),
        ("split", SPLITS, ("model.data.split=random",), "column 'split' is not used: model.data.split=random"),
    ],
)
def test_a_column_that_is_not_used_is_mentioned(
    column: str, cells: list[str], more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    rows = [(text, n / 7, cells[n % 3]) for n, text in enumerate(peptides(40))]
    data = read(write(tmp_path / "x.csv", f"sequence,label,{column}", rows), "regression", *more)
    assert sizes(data) == [32, 4, 4]
    assert [note.partition(": ")[2] for note in data.notes] == [message]


def test_molecules_are_divided_by_scaffold(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    rings = ["c1ccccc1", "C1CCCC1", "c1ccncc1", "c1ccoc1", ""]
    texts = [f"{'C' * (1 + n)}{rings[n * n % 5]}" for n in range(40)]
    path = write(tmp_path / "x.csv", "smiles,label", [(text, n / 7) for n, text in enumerate(texts)])
    data = read(path, "regression", "model.data.split=scaffold", vocabulary=smiles)
    wanted = divide_by_scaffold(texts, 0.1, 0.1)
    for name in SPLITS:
        assert data.splits[name].texts == [text for text, each in zip(texts, wanted, strict=True) if each == name]
    with pytest.raises(UserError, match=r"k\.split=similarity needs proteins: set it to scaffold"):
        read(path, "regression", "model.data.split=similarity", vocabulary=smiles)
    with pytest.raises(UserError, match=r"k\.split=scaffold needs molecules"):
        read(write(path, "sequence,label", [(text, 1) for text in texts]), "regression", "model.data.split=scaffold")
    for name in SPLITS:
        (tmp_path / "d" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=r"k\.split=random: .* is divided already"):
        read(tmp_path / "d", "regression", "model.data.split=random")


def test_molecules_that_cannot_be_used(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    texts = [f"{'C' * n}O" for n in range(1, 31)]
    texts[3:3] = ["C1CC(", "c1ccccc", "[Hg+2]"]
    path = write(tmp_path / "x.csv", "smiles,label", [(text, n / 7) for n, text in enumerate(texts)])
    data = read(path, "regression", vocabulary=smiles)
    assert sizes(data) == [24, 3, 3]
    assert data.notes == [
        f"{path}: RDKit cannot read 2 of 33 SMILES (the first is {path}:5, 'C1CC('); their records are dropped",
        f"{path}: the model knows no token of 1 of 33 SMILES (the first is {path}:7, '[Hg+2]'); their records are "
        "dropped",
    ]
    kept = read(path, "regression", "model.data.on_invalid=keep", vocabulary=smiles)
    assert sum(sizes(kept)) == 33 and "they are used unchanged" in kept.notes[0]
    with pytest.raises(
        UserError, match=r"cannot read 2 of 33 SMILES .*x\.csv:5, 'C1CC\('\): correct them, or set k.on_invalid to"
    ):
        read(path, "regression", "model.data.on_invalid=error", vocabulary=smiles)


@pytest.mark.parametrize("task_type", ["classification", "regression", "token-level-classification"])
def test_rows_without_a_label_are_left_out(task_type: str, tmp_path: Path) -> None:
    """A cell with as many letters as residues holds labels, as NA for two residues."""
    label = {"classification": "{}", "regression": "{}.5", "token-level-classification": "H{}" + "E" * 18}[task_type]
    rows = [(text, label.format(n % 2)) for n, text in enumerate(peptides(60))]
    missing = ["", "NA", "NaN", "null", "None", " ", "#N/A", "<NA>", "nan"]
    gaps = [(text, cell) for text, cell in zip(peptides(70)[60:], missing, strict=False)]
    path = write(tmp_path / "x.csv", "sequence,label,other", [(*row, "") for row in (*rows, *gaps)])
    data = read(path, task_type)
    assert sum(sizes(data)) == 60
    assert data.notes == [
        f"{path}: 9 of 69 rows have no label in column 'label' (2 empty, 1 NA, 1 NaN, 1 null, 1 None, 1 #N/A, 1 <NA>, "
        "1 nan): left out"
    ]
    if task_type == "token-level-classification":
        write(path, "sequence,label", [*rows, ("MK", "NA")])
        assert sum(sizes(read(path, task_type))) == 61


def test_files_of_splits_have_the_same_missing_labels(tmp_path: Path) -> None:
    for name in SPLITS:
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x000.csv", "sequence,label", [("MKT", 1), ("MKV", 2), ("MKL", "NaN")])
    data = read(tmp_path, "regression")
    assert sizes(data) == [2, 2, 2] and len(data.notes) == 5
    assert f"{tmp_path}: 2 of 2 sequences of the val split are in the training split, too" in data.notes
    assert f"{tmp_path}/val/x000.csv: 1 of 3 rows have no label in column 'label' (1 NaN): left out" in data.notes


def test_what_a_given_division_repeats_is_counted(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    """Rows of a test that the training split has too, classes that contradict each other or differ in case."""
    texts = peptides(20)
    rows = [(text, "Active", "train") for text in texts[:18]] + [(text, "active", "test") for text in texts[16:]]
    rows.append((peptides(21)[20], "Active", "val"))
    data = read(write(tmp_path / "x.csv", "sequence,label,split", [*rows, (texts[0], "active", "train")]),
                "classification")  # fmt: skip
    assert [note.partition(": ")[2] for note in data.notes[1:]] == [
        "2 of 4 sequences of the test split are in the training split, too",
        "3 sequences have several classes in different rows",
        "several classes are 'active' in upper or lower case: write them alike if they are the same",
    ]
    molecules = [f"{'C' * n}O" for n in range(1, 15)]
    rows = [(text, n, "train") for n, text in enumerate(molecules)] + [("OCC", 1, "test"), ("NCC", 2, "test")]
    data = read(write(tmp_path / "m.csv", "smiles,label,split", rows), "regression", vocabulary=smiles)
    assert f"{tmp_path}/m.csv: 1 of 2 sequences of the test split are in the training split, too" in data.notes


def test_molecules_too_large_for_rdkit_and_texts_behind_a_smiles(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    """RDKit's recursion would end the process; a SMILES ends at the first white space."""
    texts = ["C" * 30_000, "CCO |$;;OH$|", "OCC ethanol", *("C" * n for n in range(3, 20))]
    path = write(tmp_path / "x.csv", "smiles,label", [(text, n / 7) for n, text in enumerate(texts)])
    data = read(path, "regression", vocabulary=smiles)
    assert sum(sizes(data)) == 20
    split_of = {text: name for name in SPLITS for text in data.splits[name].texts}
    assert split_of["CCO |$;;OH$|"] == split_of["OCC ethanol"]


def test_an_error_says_what_was_left_out_before(tmp_path: Path, smiles: SmilesTokenizer) -> None:
    path = write(tmp_path / "x.csv", "smiles,label", [(text, 0.5) for text in peptides(20)])
    with pytest.raises(UserError, match=r"0 different sequences: .*cannot read 20 of 20 SMILES of column 'smiles', "
                       r"which k\.sequence_column selects \(the first"):  # fmt: skip
        read(path, "regression", vocabulary=smiles)


@pytest.mark.parametrize("name", ["BindingDB Reactant_set_id", "set_id", "split_notes"])
def test_columns_with_other_names_are_not_mentioned(name: str, tmp_path: Path) -> None:
    rows = [(text, n / 7, n) for n, text in enumerate(peptides(40))]
    assert read(write(tmp_path / "x.csv", f"sequence,label,{name}", rows), "regression").notes == []


@pytest.mark.parametrize("name", ["is_train", "validation", "Test", "in_test", "holdout"])
def test_columns_of_flags_are_mentioned(name: str, tmp_path: Path) -> None:
    rows = [(text, n / 7, n % 2) for n, text in enumerate(peptides(40))]
    notes = read(write(tmp_path / "x.csv", f"sequence,label,{name}", rows), "regression").notes
    assert notes == [f"{tmp_path}/x.csv: column {name!r} is not used: its cells are not train, val and test"]


@pytest.mark.parametrize("values", [["0", "0.25", "1.0", "2.75"], ["yes", "no", "no", "no"]])
def test_a_column_validation_with_other_values_divides_nothing(tmp_path: Path, values: list[str]) -> None:
    rows = [(p, str(i), ("train", "train", "test")[i % 3], values[i % 4]) for i, p in enumerate(peptides(24))]
    data = read(write(tmp_path / "x.csv", "sequence,label,set,validation", rows), "regression")
    assert sizes(data) == [15, 1, 8]  # one of the 16 chosen at random
    assert any("column 'validation' is not used" in note for note in data.notes)


def test_the_validation_column_of_flip_is_not_mentioned_as_unused(tmp_path: Path) -> None:
    rows = [(text, n / 7, n % 8 == 0, "test" if n % 5 == 4 else "train") for n, text in enumerate(peptides(40))]
    data = read(write(tmp_path / "x.csv", "sequence,label,validation,set", rows), "regression")
    assert sizes(data) == [28, 4, 8]
    assert data.notes == [f"{tmp_path}/x.csv: column 'set' divides the rows: 28 train, 4 val, 8 test"]
