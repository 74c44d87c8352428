# SPDX-License-Identifier: Apache-2.0
"""Cells of tables: missing values and numbers."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bionemo.analysis.variant_files import parse_scores
from bionemo.common.errors import UserError
from bionemo.data.table import describe_missing, is_missing, parse_number, parse_table, read_table, single_column


@pytest.mark.parametrize("value", [float("nan"), None, pd.NA, pd.NaT, np.nan])
@pytest.mark.parametrize("written", ["", "NA", "NaN", "NULL", "None", "<NA>"])
def test_missing_values_of_pandas_are_missing(value: object, written: str) -> None:
    text = pd.DataFrame({"x": [value, "a"], "y": [1, 2]}).to_csv(index=False, na_rep=written)
    table = parse_table(io.BytesIO(text.encode()), "x.csv", ",")
    assert [is_missing(cell) for cell in table.column("x", "")] == [True, False]


def test_every_missing_value_that_pandas_reads_is_missing() -> None:
    from pandas._libs.parsers import STR_NA_VALUES

    assert all(map(is_missing, STR_NA_VALUES))


def test_other_missing_values_and_labels() -> None:
    assert all(map(is_missing, (" ", "\t", "nan", "NAN", "na", "N/A", "#N/A", "null", "Null", r"\N", " NaN ")))
    assert not any(map(is_missing, ("0", "Na", "none", "no", "n.d.", "-", "x", "nano", "NAD", "unknown")))
    assert describe_missing(["", " ", "NaN", "", "NaN"]) == "3 empty, 2 NaN"


def test_numbers() -> None:
    for text, number in {"1": 1, " -0.5 ": -0.5, "1e-3": 0.001, ".5": 0.5, "5.": 5, "+2": 2, "1E5": 1e5}.items():
        assert parse_number(text) == number
    assert parse_number("-inf") == -np.inf
    for text in ("<1", "1,5", "1_000", "1 000", "nan", "", "0x1", "5%", "n.d."):
        assert parse_number(text) is None


def test_lines_without_text_are_skipped() -> None:
    """Spreadsheets write them below a table."""
    table = parse_table(io.BytesIO(b"a,b\n1,2\n,\n\n , \n3,\n"), "x.csv", ",")
    assert table.rows == [["1", "2"], ["3", ""]]
    assert table.locations == ["x.csv:2", "x.csv:6"]


@pytest.mark.parametrize(("name", "separator"), [("x.csv", ";"), ("x.csv", "\t"), ("x.TSV", "\t"), ("x.csv", ",")])
def test_separators(name: str, separator: str, tmp_path: Path) -> None:
    """Spreadsheets in countries with a decimal comma separate columns by semicolons."""
    path = tmp_path / name
    path.write_text(f'\ufeffsequence{separator}y\nMKT{separator}"0,5"\n')
    table = read_table(path)
    assert (table.columns, table.rows) == (["sequence", "y"], [["MKT", "0,5"]])


def test_measured_scores_have_the_same_missing_values() -> None:
    table = parse_table(io.BytesIO(b"m,s\nA1C,0.5\nA1D,N/A\nA1E,null\nA1F,-inf\n"), Path("x.csv"), ",")
    scores = parse_scores(table, table.column("s", ""), "correct it")
    np.testing.assert_array_equal(scores, [0.5, np.nan, np.nan, -np.inf])


def test_one_column() -> None:
    assert single_column("key", ["a"]) == single_column("key", "a") == "a"
    assert single_column("key", None) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "sequence;Tm, C\nMKT;1\n"),  # a comma in a title
        ("x.csv", "sequence\tTm, C\nMKT\t1\n"),
        ("x.tsv", "sequence,Tm\nMKT,1\n"),
        ("x.csv", "\n\nsequence,Tm\nMKT,1\n"),  # blank lines first
    ],
)
def test_the_separator_follows_from_two_lines(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    table = read_table(tmp_path / name)
    assert (table.columns[0], table.rows) == ("sequence", [["MKT", "1"]])


def test_lines_above_the_titles(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("# written by a program\nsequence,y\nMKT,1\n")
    with pytest.raises(UserError, match=r"has one cell and .*x.csv:2 has 2: quote a cell .* remove the lines above"):
        read_table(path)


def test_a_missing_column_is_compared_with_all_others() -> None:
    header = ",".join(["sequence", *(f"assay_{number}" for number in range(40))])
    table = parse_table(io.BytesIO(f"{header}\n".encode()), "x.csv", ",")
    with pytest.raises(UserError, match=r"no column 'Assay_39' \(did you mean assay_39\?\), .* and 25 more: fix it"):
        table.column("Assay_39", "fix it")
