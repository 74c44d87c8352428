# SPDX-License-Identifier: Apache-2.0
import re

import pytest
from braceexpand import braceexpand

from bionemo.common.errors import UserError
from bionemo.data.shards.ranges import expand_range, shard_paths


@pytest.mark.parametrize(
    ("pattern", "stems"),
    [
        ("x000", ["x000"]),
        ("x000.csv", ["x000"]),
        ("x[000..003]", ["x000", "x001", "x002", "x003"]),
        ("x(000..001)", ["x000", "x001"]),
        ("x<000..001>", ["x000", "x001"]),
        ("x{000..001}", ["x000", "x001"]),
        ("x_OP_000..001_CL_", ["x000", "x001"]),
        ("x[0..1].csv", ["x0", "x1"]),
        ("x[0..3]", ["x0", "x1", "x2", "x3"]),
        ("x[08..11]", ["x08", "x09", "x10", "x11"]),
        ("x<8..11>", ["x8", "x9", "x10", "x11"]),
        ("x[3..0]", ["x3", "x2", "x1", "x0"]),
        ("x[000..006..2]", ["x000", "x002", "x004", "x006"]),
        ("x[000,003]", ["x000", "x003"]),
        ("x[a..c]", ["xa", "xb", "xc"]),
        ("a[0..1]b[0..1]", ["a0b0", "a0b1", "a1b0", "a1b1"]),
        ("x[[0..1],5]", ["x0", "x1", "x5"]),
        ("x[0]", ["x0"]),
        ("x000,x001", ["x000,x001"]),
        ("x[0..1],y0", ["x0,y0", "x1,y0"]),
        ("x[001..1]", ["x001"]),
        ("x[-1..1]", ["x-1", "x0", "x1"]),
        ("/data/exp(1)/x[0..1]", ["/data/exp(1)/x0", "/data/exp(1)/x1"]),
        ("a[0/x0", ["a[0/x0"]),
        ("a]0/x0", ["a]0/x0"]),
        ("run{1}/set[]/date[2020-01]/x0", ["run{1}/set[]/date[2020-01]/x0"]),
        ("x[2020-01,2020-02]", ["x2020-01", "x2020-02"]),
        ("x[train-clean]", ["xtrain-clean"]),
        (["x[0..1]", "y0"], ["x0", "x1", "y0"]),
    ],
)
def test_expansion(pattern, stems):
    assert expand_range(pattern, ".csv") == [f"{stem}.csv" for stem in stems]


@pytest.mark.parametrize(
    "pattern",
    ["d[0..1]/x000", "d_OP_a,b_CL_/x<0..2>", "[uf50/x000,uf90/x001]", "a(0..1)/b{x,y}/c[1..2]", "d_OP_7..7_CL_/x0"],
)
def test_sets_in_directories_are_expanded_as_by_nemo(pattern):
    """NeMo replaces every bracket of a path by a brace, and expands the result."""
    braces = re.sub(r"_OP_|[(\[<]", "{", re.sub(r"_CL_|[)\]>]", "}", pattern))
    assert expand_range(pattern, "") == list(braceexpand(braces, escape=False))


def test_sets_in_the_path_of_a_data_set(tmp_path):
    for name in ("a0", "a1", "b[0,1]"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "x0.csv").touch()
    first, second = (tmp_path / name / "train" / "x0.csv" for name in ("a0", "a1"))
    assert shard_paths(tmp_path / "a_OP_0..1_CL_", "train", "x0") == [first, second]
    assert shard_paths(tmp_path / "a[0..1]", "train", ["x0", str(first)]) == [first, first, second]
    assert shard_paths(tmp_path / "b[0,1]", "train", "x0") == [tmp_path / "b[0,1]" / "train" / "x0.csv"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x[0..2", r"unbalanced '\['"),
        ("x_OP_0..2", "unbalanced '_OP_'"),
        ("x0..2)", r"unbalanced '\)'"),
        ("x[]", r"empty '\[\]'"),
        ("x[0..99999999]", "more than 100,000"),
        ("", "not a range"),
        (7, "not a range"),
        ("x_OP_000-003_CL_", r"'000-003' in 'x_OP_000-003_CL_' is not a range: write 000\.\.003"),
        ("x_OP_000:003_CL_", r"write 000\.\.003"),
        ("x[0...3]", r"write 0\.\.3"),
        ("d_OP_0-3_CL_/x0", r"write 0\.\.3"),
    ],
)
def test_errors_are_one_line(pattern, message):
    with pytest.raises(UserError, match=message) as error:
        expand_range(pattern, ".csv")
    assert "\n" not in str(error.value)


def test_shards_are_in_the_directory_of_the_split_or_of_an_absolute_pattern(tmp_path):
    (tmp_path / "set(1)" / "train").mkdir(parents=True)
    for name in ("x0.csv", "x1.csv"):
        (tmp_path / "set(1)" / "train" / name).touch()
    expected = [tmp_path / "set(1)" / "train" / name for name in ("x0.csv", "x1.csv")]
    assert shard_paths(tmp_path / "set(1)", "train", "x[0..1]", ".csv") == expected
    assert shard_paths("/elsewhere", "test", f"{tmp_path}/set(1)/train/x_OP_0..1_CL_", ".csv") == expected


def test_all_missing_files_are_listed_at_once(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x000.csv.gz").touch()
    with pytest.raises(UserError) as error:
        shard_paths(tmp_path, "train", "x[000..049]", ".csv")
    text = str(error.value)
    assert "50 of 50" in text and "x009.csv and 40 more" in text and "x010" not in text
    assert str(tmp_path / "train") in text and "x000.csv.gz" in text and "\n" not in text
    with pytest.raises(UserError, match="does not exist"):
        shard_paths(tmp_path, "val", "x000", ".csv")


def test_indexes_are_not_listed_as_content_of_a_directory(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("x000.csv", "x000.csv.idx-0a1b2c3d"):
        (tmp_path / "train" / name).touch()
    with pytest.raises(UserError, match=r"x001\.csv; it contains x000\.csv; set model.data.dataset.train to files"):
        shard_paths(tmp_path, "train", "x[000..001]")
