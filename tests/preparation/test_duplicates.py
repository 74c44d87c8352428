# SPDX-License-Identifier: Apache-2.0
"""Records with the sequence of an earlier record: `duplicates=keep|drop|error`."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from tests.support.preparation import left, make_job, prepare, reference, rows, shards, small, write

SMALL = {"chunk": 7, "block": 5, "bucket": 20, "partition": 2}
CASES = {  # records, policies, numbers of the kept ones from 1, dropped and kept names
    "none": ("a MKV|b MK|c VLA", "", [1, 2, 3], []),
    "first stays": ("a MKV|b MK|c MKV|d MK|e MKV", "", [1, 2], [("c", "a"), ("d", "b"), ("e", "a")]),
    "lower case": ("a MKV|b mkv|c MkV", "", [1], [("b", "a"), ("c", "a")]),
    "stripped": ("a M-KV|b MKV*", "on_letters=strip", [1], [("b", "a")]),
    "invalid first": ("a M1|b M1|c MK|d MK", "on_letters=skip", [3], [("d", "c")]),
    "same name": ("a MKV|a VLA|b VLA|c MKV", "on_duplicate=skip", [1, 3], [("c", "a")]),
    "same name and sequence": ("a MKV|a MKV|b MKV", "on_duplicate=skip", [1], [("b", "a")]),
    "same name kept": ("a MKV|a VLA|b VLA", "on_duplicate=keep", [1, 2], [("b", "a")]),
    "commas and quotes": ('a,b MKV|"c" MKV|é,"f" MKV', "", [1], [('"c"', "a,b"), ('é,"f"', "a,b")]),
}


def fasta(text: str) -> str:
    return "".join(">{}\n{}\n".format(*record.split(" ")) for record in text.split("|"))


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["whole", "cut"])
@pytest.mark.parametrize(("text", "policies", "kept", "listed"), CASES.values(), ids=CASES)
def test_the_first_record_stays(
    tmp_path: Path, text: str, policies: str, kept: list[int], listed: list[tuple[str, str]], sizes: dict[str, int]
) -> None:
    changes = dict(item.split("=") for item in policies.split())
    with small(**sizes):
        manifest = prepare(
            write(tmp_path, fasta(text)), tmp_path / "out", val_size=0, test_size=0, duplicates="drop", **changes
        )
    assert sorted(int(row[0]) for row in rows(tmp_path / "out")["train"]) == kept
    [tally] = manifest.tallies.values()
    assert tally.dropped.get("identical sequence", 0) == len(listed)
    if not listed:
        assert not (tmp_path / "out" / "duplicates.csv").exists()
        return
    with (tmp_path / "out" / "duplicates.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["dropped", "kept"], *map(list, listed)]
    assert manifest.files["duplicates.csv"].rows == len(listed)


def test_many_against_a_dictionary(tmp_path: Path) -> None:
    """Several chunks and partitions; the remaining records are divided as if the others did not exist."""
    rng = np.random.default_rng(0)
    records = [(f"n{number}", "".join(rng.choice([*"MK"], rng.integers(1, 9)))) for number in range(400)]
    first: dict[str, str] = {}
    for name, letters in records:
        first.setdefault(letters, name)
    source = write(tmp_path, "".join(f">{name}\n{letters}\n" for name, letters in records))
    with small(chunk=300, block=100, partition=20):
        prepare(source, tmp_path / "out", duplicates="drop", val_size=20, test_size=10, num_csv_files=3)
    kept = [number for number, (name, letters) in enumerate(records) if first[letters] == name]
    assert 200 > len(kept) > 50
    found = shards(tmp_path / "out")
    listed = found.pop("duplicates.csv").decode().splitlines()[1:]
    assert listed == [f"{name},{first[letters]}" for name, letters in records if first[letters] != name]
    numbers = [number + 1 for number in kept]
    assert found == reference([records[number] for number in kept], 20, 10, 0, 3, numbers)


def test_an_error_names_both_records(tmp_path: Path) -> None:
    source = write(tmp_path, ">a\nMKV\n>b\nMK\n>c\nM\nKV\n>d\nMKV\n")
    with pytest.raises(UserError) as error:
        prepare(source, tmp_path / "out", duplicates="error")
    assert str(error.value) == (
        f"{source}:5: record 'c' has the same sequence as the record at {source}:1 (2 such records): remove it, or "
        "set duplicates=drop (keeps the first) or keep"
    )
    assert not left(tmp_path / "out")


@pytest.mark.parametrize("keys", [["duplicates"], ["split", "min_seq_id", "coverage", "cluster_tsv"]])
def test_settings_without_effect_are_not_in_the_manifest(tmp_path: Path, keys: Sequence[str]) -> None:
    """So data sets that were prepared before these settings existed are complete."""
    source = write(tmp_path, ">a\nMKV\n>b\nMKV\n>c\nM\n")
    manifest = prepare(source, tmp_path / "out")
    assert not {*keys} & {*manifest.parameters}
    assert {*keys} <= {*vars(make_job(source, tmp_path))}
    assert "similarity" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert not (tmp_path / "out" / "duplicates.csv").exists()
