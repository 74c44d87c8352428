# SPDX-License-Identifier: Apache-2.0
"""Labelled files are read unchanged, and invalid records are reported with file and line."""

from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.data.table import read_table
from bionemo.finetuning.labels import IGNORED, Example, TaskColumns, encode, find_classes
from bionemo.finetuning.labels import read_examples as read_tables

TOKENS = TaskColumns("token-level-classification", "sequence", "3state", "resolved")
CLASSES = TaskColumns("classification", "sequence", "label")
NUMBERS = TaskColumns("regression", "sequence", "target")


def read_examples(paths: list[Path], columns: TaskColumns) -> list[Example]:
    return read_tables([read_table(path) for path in paths], columns, [])


def written(path: Path, text: str) -> list[Path]:
    path.write_text(text)
    return [path]


def test_token_classes(tmp_path: Path) -> None:
    """Labels of unresolved residues are ignored, whatever their value."""
    files = written(tmp_path / "x.csv", "id,sequence,3state,resolved\na,MKTA,HHEC,1101\nb,GG,~C,01\n")
    examples = read_examples(files, TOKENS)
    assert find_classes(examples, TOKENS, 3) == ("C", "H")
    split = encode(examples, TOKENS, ("C", "E", "H"))
    assert split.texts == ["MKTA", "GG"]
    assert [each.tolist() for each in split.targets] == [[2, 2, IGNORED, 0], [IGNORED, 0]]


def test_sequence_classes_and_values(tmp_path: Path) -> None:
    files = written(tmp_path / "x.csv", 'sequence,label\nMK,"Cell, membrane"\nMT,Nucleus\n')
    examples = read_examples(files, CLASSES)
    classes = find_classes(examples, CLASSES)
    assert classes == ("Cell, membrane", "Nucleus")
    assert [int(each) for each in encode(examples, CLASSES, classes).targets] == [0, 1]
    files = written(tmp_path / "y.csv", "target,sequence\n-1.5e-3,MK\n2,MT\n")
    targets = np.stack(encode(read_examples(files, NUMBERS), NUMBERS, ()).targets)
    assert targets.dtype == np.float32
    assert targets.tolist() == [np.float32(-1.5e-3), 2.0]


def test_several_files_are_one_split(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.csv", f"sequence,target\nM{'K' * n},{n}\n")[0] for n in range(3)]
    assert [each.text for each in read_examples(files, NUMBERS)] == ["M", "MK", "MKK"]


@pytest.mark.parametrize(
    ("columns", "text", "message"),
    [
        (TOKENS, "sequence,3state\nMK,HH\n", "x.csv has no column 'resolved', but 'sequence', '3state'"),
        (TOKENS, "", "x.csv has no column 'sequence', but nothing: set model.data.sequence_column"),
        (TOKENS, "sequence,3state,resolved\n", "has no examples"),
        (TOKENS, "sequence,3state,resolved\nMK,HHH,11\n", "x.csv:2: 3 labels for 2 residues: each needs one"),
        (TOKENS, "sequence,3state,resolved\nMK,HH,1\n", "x.csv:2: 1 digits in the mask for 2 residues"),
        (TOKENS, "sequence,3state,resolved\nMK,HH,12\n", "x.csv:2: the mask has '2', expected 1"),
        (TOKENS, "sequence,3state,resolved\nMK,HH,11\nMKT,HHH,\n", "x.csv:3: the row is incomplete"),
        (TOKENS, "sequence,3state,resolved\nMK,HH,11\nNaN,HHH,111\n", "x.csv:3: the row is incomplete"),
        (CLASSES, "sequence,label\nMK,NA\nMT,\n", "x.csv: 2 of 2 rows have no label in column 'label'"),
        (CLASSES, "sequence,label\nMK\n", "x.csv:2: the row is incomplete: fill in sequence, label"),
        (CLASSES, "sequence,label\nMK,Cell, membrane\n", "x.csv:2: 3 cells under 2 columns: put cells that contain"),
        (CLASSES, 'sequence,label\nMK,"a\nMT,b\n', "x.csv is not a valid CSV file"),
        (CLASSES, "sequence,label,label\nMK,a,b\n", "x.csv has 2 columns 'label': remove all but one"),
        (NUMBERS, "sequence,target\nMK,high\n", "x.csv:2: the target is 'high', expected a number"),
        (NUMBERS, "sequence,target\nMK,inf\n", "x.csv:2: the target is 'inf', expected a number"),
        (NUMBERS, "sequence,target\nMK,1e39\n", "x.csv:2: the target is '1e39', expected a number"),
        (NUMBERS, "sequence,target\nMK,1_000\n", "x.csv:2: the target is '1_000', expected a number"),
    ],
)
def test_inconsistent_files(columns: TaskColumns, text: str, message: str, tmp_path: Path) -> None:
    files = written(tmp_path / "x.csv", text)
    with pytest.raises(UserError) as caught:
        encode(read_examples(files, columns), columns, ("H",))
    assert message in str(caught.value)


def test_a_file_of_a_split_without_rows(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.csv", "sequence,target\n" + "MK,1\n" * n)[0] for n in (1, 0)]
    with pytest.raises(UserError, match=r"0\.csv has no examples"):
        read_examples(files, NUMBERS)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"sequence,target\n\xff\xfe,1\n")
    for path in (tmp_path / "x.csv", tmp_path, tmp_path / "none.csv"):
        with pytest.raises(UserError, match=r"cannot be read|not a regular file"):
            read_examples([path], NUMBERS)


def test_labels_that_do_not_occur_in_training(tmp_path: Path) -> None:
    train = read_examples(written(tmp_path / "train.csv", "sequence,label\nMK,a\nMT,b\n"), CLASSES)
    test = read_examples(written(tmp_path / "test.csv", "sequence,label\nMK,a\nMT,c\n"), CLASSES)
    with pytest.raises(UserError, match=r"test\.csv:3: the training split does not have the label 'c' \(but a, b\)"):
        encode(test, CLASSES, find_classes(train, CLASSES))
    with pytest.raises(UserError, match=r"has 2 labels \(a, b\), but target_sizes is 1"):
        find_classes(train, CLASSES, 1)
    with pytest.raises(UserError, match="has only the label a: a classifier needs two"):
        find_classes(train[:1], CLASSES)
