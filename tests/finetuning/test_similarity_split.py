# SPDX-License-Identifier: Apache-2.0
"""`model.data.split=similarity`: no related proteins in different splits, checked by alignments of Biotite."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.results import describe_data
from bionemo.finetuning.task_data import TaskData, read_splits
from tests.finetuning.tables import peptides, write
from tests.support.families import families, identity, leaked, needs_mmseqs, replace_mmseqs

SPLITS = ("train", "val", "test")


def config(path: Path, *more: str) -> DownstreamConfig:
    given = [f"model.data.dataset_path={path}", "model.data.task_name=x", "model.data.task_type=regression",
             "model.data.target_column=label", "model.data.split=similarity", *more]  # fmt: skip
    return load("downstream_table", given, schema=DownstreamConfig)


def read(path: Path, *more: str) -> TaskData:
    return read_splits(config(path, *more).model.data, "k", SPLITS)


def proteins(data: TaskData) -> dict[str, list[str]]:
    """Return the sequence of each row in upper case."""
    return {name: [text.upper() for text in data.splits[name].texts] for name in SPLITS}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write families, the first member of each twice, with different labels and in different spellings."""
    texts = families(1, 14, 12)
    rows = [*texts.values(), *(text.lower() for name, text in texts.items() if name.endswith(".0"))]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    return write(tmp_path_factory.mktemp("table") / "x.csv", "sequence,label", [(rows[n], n / 7) for n in order])


@pytest.fixture(scope="module")
def divided(table: Path) -> TaskData:
    return read(table)


@needs_mmseqs
def test_no_related_proteins_are_in_different_splits(divided: TaskData, table: Path) -> None:
    splits = proteins(divided)
    assert leaked(splits) == 0
    assert all(identity(first, second) < 0.3 for first, second in itertools.product(splits["val"], splits["test"]))
    family = {text: name.partition(".")[0] for name, text in families(1, 14, 12).items()}
    found = [{family[text] for text in splits[name]} for name in SPLITS]
    assert sum(map(len, found)) == len(set.union(*found)) == 26
    tenth = sum(map(len, splits.values())) // 10
    sizes = {name: len(splits[name]) for name in ("val", "test")}
    assert {*sizes.values()} <= {tenth, tenth - 1}  # the smallest cluster has two rows

    at_random = read(table, "model.data.split=random")
    leak = leaked(proteins(at_random))
    assert leak >= tenth
    report = describe_data(config(table), divided)["data"]["similarity"]
    assert (report["min_seq_id"], report["coverage"], report["above_threshold"]) == (0.3, 0.8, 0)
    assert (report["requested"], report["found"]) == ({"val": tenth, "test": tenth}, sizes)
    held_out = sum(sizes.values())
    assert report["held_out"] == sum(report["histogram"]) == sum(report["histogram"][:6]) == held_out
    assert report["random_split"]["held_out"] == sum(len(at_random.splits[name].texts) for name in ("val", "test"))
    assert report["random_split"]["above_threshold"] == pytest.approx(leak, abs=1)  # peptides: other alignments
    assert divided.notes[:1] == [
        f"{table}: divided by similarity: 0 of {held_out} held-out records have an identity of 0.3 or more over "
        f"80 % of both sequences to a training sequence; at random, {report['random_split']['above_threshold']} of "
        f"{report['random_split']['held_out']} have (coverage=0 also compares fragments and domains)"
    ]


@pytest.mark.slow
@needs_mmseqs
def test_the_order_of_the_rows_does_not_matter(divided: TaskData, table: Path, tmp_path: Path) -> None:
    header, *rows = table.read_text().splitlines()
    shuffled = tmp_path / "x.csv"
    shuffled.write_text("\n".join([header, *sorted(rows)]) + "\n")
    data = read(shuffled, "model.seed=7")  # of the head
    for name in SPLITS:
        pairs = [sorted(zip(each.splits[name].texts, map(float, each.splits[name].targets), strict=True))
                 for each in (data, divided)]  # fmt: skip
        assert pairs[0] == pairs[1]


@pytest.mark.slow
@needs_mmseqs
def test_texts_that_have_a_meaning_in_fasta(tmp_path: Path) -> None:
    """Characters other than letters are unknown residues; a stop codon alone is an empty sequence."""
    texts = [*peptides(20, 30), ">" + peptides(1, 30)[0], "*", f"{peptides(2, 30)[1]}-.1"]
    data = read(write(tmp_path / "x.csv", "sequence,label", [(text, n / 7) for n, text in enumerate(texts)]))
    owner = {text: name for name in SPLITS for text in data.splits[name].texts}
    assert len(owner) == 23
    assert owner[texts[0]] == owner[texts[20]] and owner[texts[1]] == owner[texts[22]]


def test_copies_are_in_one_split_and_sizes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies each of 15 proteins do not fill 4 rows; two of nine, and one of another, only one split."""
    replace_mmseqs(tmp_path / "bin", monkeypatch)
    texts = peptides(15, 40)
    rows = [(text, n / 7) for n, text in enumerate([*texts, *map(str.lower, texts), *(f"{t}*" for t in texts)])]
    data = read(path := write(tmp_path / "x.csv", "sequence,label", rows))
    splits = {name: [text.upper().rstrip("*") for text in data.splits[name].texts] for name in SPLITS}
    assert [(len(each), len({*each})) for each in splits.values()] == [(39, 13), (3, 1), (3, 1)]
    assert data.notes[1] == (
        f"{path}: divided by similarity: val and test have 3 and 3 records, not 4 and 4: no other cluster of related "
        "sequences fits; a higher min_seq_id or coverage makes clusters smaller"
    )
    write(path, "sequence,label", [(text, n / 7) for n, text in enumerate([*texts[:10], *texts[:9]])])
    with pytest.raises(UserError, match=r"x\.csv: split=similarity finds no rows for test: no .* rows \(1\): "):
        read(path)
    write(path, "sequence,label", [(text, n / 7) for n, text in enumerate(texts[:9])])
    with pytest.raises(UserError, match=r"x\.csv has 9 different sequences: give 10 or more"):
        read(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), r"needs MMseqs2, but there is no program mmseqs: install it, as with apt-get install mmseqs2, or with"),
        (("model.data.min_seq_id=0",), r"min_seq_id"),
        (("model.data.coverage=1.5",), r"coverage"),
    ],
)
def test_mistakes(more: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write(tmp_path / "x.csv", "sequence,label", [(text, n / 7) for n, text in enumerate(peptides(20))])
    with pytest.raises(UserError, match=message) as error:
        read(path, *more)
    assert "\n" not in str(error.value)
