# SPDX-License-Identifier: Apache-2.0
"""Splits by similarity: no related pair in different splits, checked by alignments of Biotite."""

import csv
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.data.proteins.similarity import TRAIN, RelativeSearch, assign_clusters, join_clusters
from bionemo.preparation.similarity import _plot
from tests.conftest import ROOT
from tests.support.families import LETTERS, families, identity, leaked, needs_mmseqs, replace_mmseqs
from tests.support.preparation import left, prepare, rows, write

SAMPLE = ROOT.parent / "shared" / "data" / "proteins" / "uniref90_sample.fasta"
SIZES = {"val_size": 12, "test_size": 12, "split": "similarity"}


def fasta(records: dict[str, str]) -> str:
    return "".join(f">{name}\n{text}\n" for name, text in records.items())


def texts_of(output: Path) -> dict[str, list[str]]:
    return {split: [row[3] for row in part] for split, part in rows(output).items()}


@pytest.mark.parametrize("count", [1, 9])
def test_counts_of_sequences_have_integer_ticks(count: int) -> None:
    svg = _plot([np.full(count, 0.2), np.full(count, 0.5)], 0.3, 0.8, ".svg").decode()
    axis = svg.partition('id="matplotlib.axis_2"')[2].partition("held-out sequences")[0]
    ticks = re.findall(r"<text [^>]*>([^<]+)</text>", axis)
    assert len(ticks) >= 2 and all(each.isdecimal() for each in ticks), ticks


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder, records = tmp_path_factory.mktemp("divided"), families(0, 20, 10)
    prepare(write(folder, fasta(records)), folder / "out", **SIZES)
    return folder / "out", records


@needs_mmseqs
def test_families_are_in_one_split(divided: tuple[Path, dict[str, str]]) -> None:
    output, records = divided
    where = {row[1].partition(".")[0]: set[str]() for part in rows(output).values() for row in part}
    for split, part in rows(output).items():
        for row in part:
            where[row[1].partition(".")[0]].add(split)
    assert {family: len(splits) for family, splits in where.items()} == dict.fromkeys(where, 1)
    assert {split: len(part) for split, part in rows(output).items()} == {
        **{"val": 12, "test": 12, "train": len(records) - 24}
    }


@needs_mmseqs
def test_no_pair_across_splits_is_related_by_alignment(divided: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    output, records = divided
    splits = texts_of(output)
    assert leaked(splits) == 0
    assert all(identity(first, second) < 0.3 for first, second in itertools.product(splits["val"], splits["test"]))
    report = json.loads((output / "manifest.json").read_text())["similarity"]
    assert report["above_threshold"] == 0 and report["held_out"] == sum(report["histogram"]) == 24
    assert report["requested"] == report["found"] == {"val": 12, "test": 12}
    with (output / "similarity.csv").open() as file:
        listed = [*csv.DictReader(file)]
    assert {(row["record_name"], row["split"]) for row in listed} == {
        (row[1], split) for split in ("val", "test") for row in rows(output)[split]
    }
    assert all(float(row["identity"]) < 0.3 for row in listed)
    for row in listed:
        assert (row["nearest"] == "") == (float(row["identity"]) == 0)
        if row["nearest"]:
            assert records[row["nearest"]] in splits["train"]
            assert identity(records[row["record_name"]], records[row["nearest"]], 0.7) == pytest.approx(
                float(row["identity"]), abs=0.05
            )
    assert (output / "similarity.png").read_bytes().startswith(b"\x89PNG")

    prepare(write(tmp_path, fasta(records)), tmp_path / "random", val_size=12, test_size=12)
    leak = leaked(texts_of(tmp_path / "random"))
    assert leak >= 10
    assert report["random_split"]["above_threshold"] == pytest.approx(leak, abs=1)  # peptides: other alignments
    assert sum(report["random_split"]["histogram"][:6]) == 24 - report["random_split"]["above_threshold"]


@needs_mmseqs
def test_fragments_and_common_domains(tmp_path: Path) -> None:
    """A protein, its half, and another protein with this half: related without a coverage, and nothing by chance."""
    rng = np.random.default_rng(2)
    shared, *others = ("".join(rng.choice(LETTERS, length)) for length in (80, 80, 120, *[90] * 30))
    texts = pa.array([text.encode() for text in (shared, shared + others[0], others[1] + shared, *others[2:])])
    numbers = np.arange(len(texts))
    found = [
        RelativeSearch(tmp_path, texts.cast(pa.large_binary()), numbers, 0.3, coverage, 1).search(numbers)
        for coverage in (0.8, 0)
    ]
    assert not (found[0][:, :2] < 3).all(axis=1).any()
    assert {tuple(row) for row in found[1].tolist()} == {(a, b, 1.0) for a, b in itertools.permutations(range(3), 2)}


@pytest.mark.slow
@needs_mmseqs
def test_order_of_records_and_threads_do_not_matter(divided: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    output, records = divided
    names = np.random.default_rng(1).permutation([*records]).tolist()
    source = write(tmp_path, fasta({name: records[name].lower() for name in names} | {"copy": records["0.0"]}))
    prepare(source, tmp_path / "out", workers=2, duplicates="drop", **SIZES)
    for split, part in rows(output).items():
        assert sorted(row[1] for row in rows(tmp_path / "out")[split]) == sorted(row[1] for row in part)


@pytest.fixture
def no_relatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_mmseqs(tmp_path / "bin", monkeypatch)


@pytest.mark.usefixtures("no_relatives")
def test_copies_are_in_one_split_and_sizes_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Five copies of each of six sequences: three fit into neither 7 nor 4 records."""
    texts = ["".join(np.random.default_rng(seed).choice(LETTERS, 40)) for seed in range(6)]
    records = {f"{number}.{copy}": text for copy in range(5) for number, text in enumerate(texts)}
    with caplog.at_level("WARNING"):
        manifest = prepare(
            write(tmp_path, fasta(records)), tmp_path / "out", val_size=7, test_size=4, split="similarity"
        )
    found = rows(tmp_path / "out")
    assert len({row[3] for row in found["val"]}) == 1 and len(found["val"]) == 5 and not found["test"]
    assert manifest.similarity["requested"] == {"val": 7, "test": 4}
    assert manifest.similarity["found"] == {"val": 5, "test": 0}
    assert manifest.similarity["distinct_sequences"] == 6
    assert "val and test have 5 and 0 records, not 7 and 4: no other cluster" in caplog.text


@pytest.mark.slow
@needs_mmseqs
def test_text_that_has_a_meaning_in_fasta(tmp_path: Path) -> None:
    """A sequence in a CSV file may begin with >, if its characters are kept."""
    texts = [text for name, text in families(1, 8, 1).items() if len(text) > 30][:8]
    lines = "".join(f"n{n},{text}\n" for n, text in enumerate([*texts, ">" + texts[0]]))
    source = write(tmp_path, "id,sequence\n" + lines, "x.csv")
    prepare(source, tmp_path / "out", val_size=2, test_size=2, split="similarity", on_letters="keep")
    splits = texts_of(tmp_path / "out")
    assert sorted(text for part in splits.values() for text in part) == sorted([*texts, ">" + texts[0]])
    assert [texts[0] in part for part in splits.values()] == [">" + texts[0] in part for part in splits.values()]


@needs_mmseqs
@pytest.mark.parametrize("texts", [["MKV", "MKL", "AAAA"], ["MKVLAAGIVALLAA"] * 3 + ["GHWY"]])
def test_only_short_sequences(tmp_path: Path, texts: list[str]) -> None:
    """MMseqs2 fails if it finds no k-mers, and is not needed."""
    source = write(tmp_path, fasta(dict(zip("abcd", texts, strict=False))))
    prepare(source, tmp_path / "out", val_size=1, test_size=0, split="similarity")
    assert [row[3] for row in rows(tmp_path / "out")["val"]] == [texts[-1]]


@needs_mmseqs
def test_one_group_cannot_be_held_out(tmp_path: Path) -> None:
    source = write(
        tmp_path, fasta({f"p{number}": "MKVLAAGIVALLAAHWYE" + "ACDEFGHIKL"[number] for number in range(10)})
    )
    with pytest.raises(
        UserError, match=r"all groups of related sequences \(min_seq_id=0.3, coverage=0.8\) are too large"
    ):
        prepare(source, tmp_path / "out", val_size=1, test_size=1, split="similarity")
    assert not (tmp_path / "out" / "train").exists()


@pytest.mark.usefixtures("no_relatives")
def test_clusters_of_a_file(tmp_path: Path) -> None:
    """Unrelated sequences in one cluster are in one split; the representative needs not be a record."""
    rng = np.random.default_rng(0)
    records = {f"{number:03}": "".join(rng.choice(LETTERS, 50)) for number in range(30)}
    lines = [f"{int(name) % 5}\t{name}\n" for name in records]
    table = write(tmp_path, "".join(lines) + "9\tno record\n", "clusters.tsv")
    source = write(tmp_path, fasta(records))
    changes = {"split": "similarity", "val_size": 6, "test_size": 6}
    manifest = prepare(source, tmp_path / "out", cluster_tsv=str(table), **changes)
    clusters = {split: {int(row[1]) % 5 for row in part} for split, part in rows(tmp_path / "out").items()}
    assert {split: len(found) for split, found in clusters.items()} == {"val": 1, "test": 1, "train": 3}
    assert manifest.similarity["clusters"] == 5
    assert [Path(each.source).name for each in manifest.inputs] == ["x.fasta", "clusters.tsv"]
    uniprot = write(tmp_path, fasta({f"sp|{name}|X_Y": text for name, text in records.items()}), "uniprot.fasta")
    message = r"'sp\|000\|X_Y' is in no cluster of .* with this name; MMseqs2 shortens sp\|P12345\|NAME to P12345$"
    with pytest.raises(UserError, match=message):  # as mmseqs easy-cluster writes the names of UniProt
        prepare(uniprot, tmp_path / "uniprot", cluster_tsv=str(table), **changes)
    for content, error in (
        ("".join(lines[1:]), rf"{source}:1: record '000' is in no cluster of {table} \(1 such records\): add it"),
        ("a b c\n", rf"^{table}: .*: each line must be a representative, a tab and a member$"),
    ):
        table.write_text(content)
        with pytest.raises(UserError, match=error):
            prepare(source, tmp_path / "bad", cluster_tsv=str(table), **changes)
        assert not left(tmp_path / "bad")
    with pytest.raises(UserError, match=r"^cluster_tsv: there is no file none\.tsv: check the path$"):
        prepare(source, tmp_path / "bad", cluster_tsv="none.tsv", **changes)
    with pytest.raises(UserError, match=r"^cluster_tsv has no effect with split=random: "):
        prepare(source, tmp_path / "bad", cluster_tsv=str(table))


@needs_mmseqs
def test_a_changed_setting_needs_force(divided: tuple[Path, dict[str, str]]) -> None:
    output, _ = divided
    prepare(output.parent / "x.fasta", output, **SIZES)
    for change, error in (({"min_seq_id": 0.5}, "min_seq_id=0.3, not 0.5"), ({"split": "random"}, "coverage=0.8")):
        with pytest.raises(UserError, match=error):
            prepare(output.parent / "x.fasta", output, **SIZES | change)


def test_mmseqs_is_missing_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, fasta(families(0, 3, 3)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no program mmseqs: install it, as with apt-get install mmseqs2"):
        prepare(source, tmp_path / "out", **SIZES | {"val_size": 1, "test_size": 1})
    program = tmp_path / "mmseqs"
    program.write_text('#!/bin/sh\n[ "$1" = version ] && exit\necho Indexing\necho "Cannot write"\necho >&2\nexit 3\n')
    program.chmod(0o755)
    with pytest.raises(UserError) as error:
        prepare(source, tmp_path / "out", **SIZES | {"val_size": 1, "test_size": 1})
    assert str(error.value) == (
        "mmseqs easy-cluster failed with status 3: Cannot write: check the free memory and disk space"
    )
    assert not left(tmp_path / "out")


def overlaps(first: str, second: str, coverage: float) -> Iterator[float]:
    """Yield the identity of each overlap without gaps that covers enough of both."""
    for offset in range(-len(second), len(first)):
        pairs = [(a, second[i - offset]) for i, a in enumerate(first) if 0 <= i - offset < len(second)]
        if pairs and len(pairs) >= coverage * max(len(first), len(second)) - 1e-9:
            yield sum(a == b for a, b in pairs) / len(pairs)


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text("MKV", min_size=1, max_size=26), min_size=1, max_size=8, unique=True),
    threshold=st.sampled_from([0.3, 0.5, 0.9, 1.0]),
    coverage=st.sampled_from([0.5, 0.8, 1.0]),
)
def test_peptides_are_compared_at_every_offset(texts: list[str], threshold: float, coverage: float) -> None:
    array = pa.array([text.encode() for text in texts], pa.large_binary())
    search = RelativeSearch(Path(), array, np.arange(len(texts))[::-1], threshold, coverage, 1)
    queries = np.arange(0, len(texts), 2)
    found = [tuple(row) for part in search._compare_peptides(queries) for row in part.tolist()]
    ordered = texts[::-1]
    expected = []
    for query, other in itertools.product(queries.tolist(), range(len(texts))):
        best = max(overlaps(ordered[query], ordered[other], coverage), default=0.0)
        short = min(len(ordered[query]), len(ordered[other])) < 20
        if short and query != other and best >= threshold - 5e-4:
            expected.append((query, other, best))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected])


def union(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    lowest = list(range(count))
    for _ in range(count):
        for first, second in pairs:
            lowest[first] = lowest[second] = min(lowest[first], lowest[second])
    return lowest


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12), st.integers(0, 12))
def test_clusters_are_joined_by_pairs(pairs: list[tuple[int, int]], cut: int) -> None:
    def array(part: list[tuple[int, int]]) -> np.ndarray:
        return np.array(part, np.int64).reshape(-1, 2)

    first = join_clusters(np.arange(10), array(pairs[:cut]))
    assert first.tolist() == union(10, pairs[:cut])
    assert join_clusters(first, array(pairs[cut:])).tolist() == union(10, pairs)


@pytest.mark.parametrize(
    ("totals", "sizes", "found"),
    [
        ([50, 10, 7, 3], (10, 0), (10, 0)),
        ([50, 10, 7, 3], (10, 10), (10, 10)),
        ([50], (5, 5), (0, 0)),
        ([4, 4, 4, 3], (7, 4), (7, 4)),
        ([9, 9, 9], (10, 8), (9, 0)),
        ([1] * 30, (3, 2), (3, 2)),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_whole_clusters_fill_the_splits(
    totals: list[int], sizes: tuple[int, int], found: tuple[int, int], seed: int
) -> None:
    """Sizes are never exceeded, and no cluster that is left in training would fit."""
    rng = np.random.default_rng(seed)
    weights = np.array(totals)
    splits = assign_clusters(np.arange(len(totals)), weights, sizes, rng.permutation(len(totals)))
    used = [int(weights[splits == split].sum()) for split in (0, 1)]
    assert all(number <= size for number, size in zip(used, sizes, strict=True))
    rest = weights[splits == TRAIN]
    assert not len(rest) or all(rest.min() > size - number for number, size in zip(used, sizes, strict=True))
    assert splits.dtype == np.int8 and used == list(found)


@pytest.mark.slow
@needs_mmseqs
@pytest.mark.skipif(not SAMPLE.exists(), reason="needs shared data")
def test_real_proteins(tmp_path: Path) -> None:
    """Of the shorter proteins of UniRef90, no pair of held-out and training is related; a third of random ones are."""
    records: dict[str, str] = {}
    for line in SAMPLE.read_text().splitlines():
        if line.startswith(">"):
            records[name := line[1:].split()[0]] = ""
        else:
            records[name] += line
    chosen = {name: text for name, text in records.items() if len(text) < 150}
    source = write(tmp_path, fasta(chosen))
    prepare(source, tmp_path / "similar", split="similarity", val_size=20, test_size=20)
    prepare(source, tmp_path / "random", val_size=20, test_size=20)
    assert leaked(texts_of(tmp_path / "similar")) == 0
    assert leaked(texts_of(tmp_path / "random")) >= 13
