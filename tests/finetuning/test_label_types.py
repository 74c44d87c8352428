# SPDX-License-Identifier: Apache-2.0
"""The type of the labels follows from the whole column, and from numbers first."""

from pathlib import Path

import numpy as np
import pytest

from bionemo.cli.finetune_arguments import find_task_type, replace_table_arguments
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.data.table import read_table
from bionemo.finetuning.labels import TaskColumns, class_name, find_classes, read_examples
from bionemo.finetuning.task_data import read_splits
from tests.finetuning.tables import peptides, write

TOKENS, CLASSES, NUMBERS = "token-level-classification", "classification", "regression"
STATES = [text.translate(str.maketrans("ACDEFGHIKLMNPQRSTVWY", "HECCC" * 4)) for text in peptides(40, 9)]


def find(sequences: list[str], labels: list[str]) -> str:
    return find_task_type(sequences, labels, [f"x.csv:{line}" for line in range(2, len(labels) + 2)])


@pytest.mark.parametrize("title", ["Standard Relation", "standard_relation", "relation"])
def test_numbers_that_are_bounds_are_noted(title: str, tmp_path: Path) -> None:
    """ChEMBL writes the relations in quotes; rows without a number do not count."""
    relations = [*["'='"] * 5, "'>'", "<", "~", "", ">"]
    rows = [(text, "" if n == 9 else n / 7, relations[n]) for n, text in enumerate(peptides(10))]
    found = read_table(write(tmp_path / "x.csv", f"sequence,label,{title}", rows))
    notes: list[str] = []
    read_examples([found], TaskColumns(NUMBERS, "sequence", "label"), notes)
    assert notes[1:] == [
        f"{tmp_path}/x.csv: 3 rows have another value than = in column {title!r}, but their numbers are used as exact "
        "values: remove these rows"
    ]
    classes: list[str] = []
    read_examples([found], TaskColumns(CLASSES, "sequence", "label"), classes)
    assert classes == notes[:1]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["0"] * 1500 + ["0.5", "1.25"], NUMBERS),  # zeros first
        ([f"{0.1234567 + n / 100:.7f}" for n in range(40)], NUMBERS),  # as long as the sequences
        (["1e-3", "5.", ".5", "+2", "-7", "1E5"], NUMBERS),
        (["", "1.5", "NA", "nan", "2"], NUMBERS),
        ([str(n) for n in range(40)], NUMBERS),
        (["0", "0.0", "1", "1.0"] * 5, CLASSES),
        (["0", "1", "NaN"] * 5, CLASSES),
        (["True", "TRUE", "False"] * 5, CLASSES),
        (["membrane", "nucleus", "1", "2"] * 5, CLASSES),
        (["1.1.1.1", "2.7.11.1", "3.4.21.4"] * 5, CLASSES),  # enzyme classes
        (["1", "2", "3A", "3B", "3C"] * 5, CLASSES),
        (STATES, TOKENS),
        (["cytoplasm", "apoplasts"] * 10, CLASSES),  # as long as the sequences
        (["010011001", "110100111"] * 10, TOKENS),
    ],
)
def test_types_of_labels_of_peptides_of_nine_residues(labels: list[str], expected: str) -> None:
    assert find(["MKTAYIAKQ"] * len(labels), labels) == expected


def test_types_with_sequences_of_different_lengths() -> None:
    texts = ["M" * (5 + n % 7) for n in range(60)]
    assert find(texts, ["H" * len(text) for text in texts]) == TOKENS
    assert find(texts, ["1" * len(text) for text in texts]) == TOKENS
    assert find(texts, [str(10.5 ** (len(text) - 3))[: len(text)] for text in texts]) == NUMBERS
    labels = ["H" * len(text) for text in texts]
    assert find(texts, [*labels[:-1], "HH"]) == TOKENS  # which reports the last row when it is read


@pytest.mark.parametrize(
    "wrong",
    ["<-0.77", ">10", "n.d.", "0,5", "1,234", "1 234", "−0.5", "5 %", "10 nM", "1.5±0.1", "inactive", "#DIV/0!"],
)
@pytest.mark.parametrize("count", [1, 40])
def test_a_label_among_numbers_that_is_none_is_named(wrong: str, count: int, tmp_path: Path) -> None:
    labels = [f"{n / 10}" for n in range(60)]
    labels[7 : 7 + count] = [wrong] * count
    path = write(
        tmp_path / "x.csv",
        "sequence,label",
        [(text, f'"{label}"') for text, label in zip(peptides(60), labels, strict=True)],
    )
    with pytest.raises(UserError) as caught:
        replace_table_arguments([f"data={path}"])
    assert str(caught.value).startswith(f"{path}:9: the label {wrong!r} is not a number with a decimal point, as most")
    assert "model.data.task_type=classification" in str(caught.value)


@pytest.mark.parametrize("form", ["<{}", ">= {}", "{},5", "{} nM"])
def test_a_column_without_a_plain_number(form: str) -> None:
    with pytest.raises(UserError, match=r"x\.csv:2: the label .* is not a number"):
        find(peptides(20), [form.format(n) for n in range(20)])


@pytest.mark.parametrize("columns", ["b", "a,b"])
def test_a_column_without_labels(columns: str, tmp_path: Path) -> None:
    rows = [(text, n / 7, label) for n, (text, label) in enumerate(zip(peptides(3), ["", "NA", "nan"], strict=True))]
    path = write(tmp_path / "x.csv", "sequence,a,b", rows)
    with pytest.raises(UserError, match=r"x\.csv: all labels of column 'b' are missing: set model.data.target_column"):
        replace_table_arguments([f"data={path}", f"model.data.target_column={columns}"])


def test_spellings_of_a_class_are_one_class(tmp_path: Path) -> None:
    labels = ["0", "0.0", "1", "1.0", "1.000000000000000000e+00", " 1"]
    rows = list(zip(peptides(6), labels, strict=True))
    columns = TaskColumns("classification", "sequence", "label")
    table = read_table(write(tmp_path / "x.csv", "sequence,label", rows))
    assert find_classes(read_examples([table], columns, []), columns) == ("0", "1")
    assert [class_name(label) for label in ("TRUE", "true", "False")] == ["True", "True", "False"]
    for label in ("1.10", "1.1", "01", "1e4", "A", "1.", "-1"):
        assert class_name(label) == {"1.": "1"}.get(label, label)


def test_several_columns_of_sequences_are_refused_by_one_message(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "sequence,a,b", [(text, n, n + 1) for n, text in enumerate(peptides(12))])
    with pytest.raises(
        UserError, match=r"sequence_column=\['a', 'b'\]: only one target is supported: start a run for"
    ):
        replace_table_arguments([f"data={path}", "model.data.sequence_column=[a,b]"])
    arguments, _ = replace_table_arguments([f"data={path}", "model.data.target_column=[b]"])
    assert "model.data.task_type='regression'" in arguments


def test_a_column_of_splits_is_no_target(tmp_path: Path) -> None:
    rows = [(text, n / 3, "train" if n % 3 else "test") for n, text in enumerate(peptides(30))]
    path = write(tmp_path / "x.csv", "sequence,lipo,split", rows)
    assert "labels in column 'lipo': regression" in str(replace_table_arguments([f"data={path}"])[1])


def test_labels_do_not_depend_on_numpy(tmp_path: Path) -> None:
    """numpy.savetxt writes classes as 1.000000000000000000e+00."""
    np.savetxt(tmp_path / "y", np.array([0, 1, 1]))
    assert [class_name(line) for line in (tmp_path / "y").read_text().split()] == ["0", "1", "1"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.5] * 40, "column 'label' of the training split has only the number 0.5: a regression needs different"),
        ([1e9 + n / 100 for n in range(40)], "has numbers whose differences are lost in fp32: subtract their mean"),
        ([(n + 1) * 1e-50 for n in range(40)], "has numbers whose differences are lost in fp32"),
    ],
)
def test_numbers_that_are_equal_in_fp32_are_refused(labels: list[float], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "sequence,label", list(zip(peptides(40), labels, strict=True)))
    arguments, _ = replace_table_arguments([f"data={path}"])
    data = load("downstream_table", arguments[1:], schema=DownstreamConfig).model.data
    with pytest.raises(UserError, match=message):
        read_splits(data, "k", ["train", "val", "test"])


@pytest.mark.parametrize(("labels", "noted"), [
    (["1.1", "1.10", "2.7"], True),
    (["1.1", "1.2", "2.7"], False),
    (["1", "01", "2"], False),
])  # fmt: skip
def test_different_texts_of_a_number_are_noted(
    labels: list[str], noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Subclasses of enzymes such as 1.1 and 1.10 look like numbers."""
    find(["MKTA"] * 9, labels * 3)
    expected = "the labels 1.1 and 1.10 are the same number; for classes, set model.data.task_type=classification"
    assert (expected in capsys.readouterr().err) == noted
