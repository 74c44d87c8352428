# SPDX-License-Identifier: Apache-2.0
"""A finished data set is not taken for another input's, and its letters are counted again when it is verified."""

import gzip
import re
from pathlib import Path

import pytest

from bionemo.errors import UserError
from bionemo.preparation.manifest import verify

from .test_sequences import prepare, shards
from .test_uniref import prepare as prepare_clusters

SIZES = {"val_size": 1, "test_size": 1, "num_csv_files": 1}


def write(path: Path, letters: str = "MKV") -> Path:
    path.write_text("".join(f">p{number}\n{letters}\n" for number in range(6)))
    return path


def test_another_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(write(tmp_path / "a.fasta"), out, **SIZES)
    made = shards(out)
    with pytest.raises(UserError, match=r"was prepared from a\.fasta, not b\.fasta: choose another output"):
        prepare(write(tmp_path / "b.fasta"), out, **SIZES)
    write(tmp_path / "a.fasta", "MKVL")
    with pytest.raises(UserError, match=r"a\.fasta has changed since"):
        prepare(tmp_path / "a.fasta", out, **SIZES)
    assert shards(out) == made
    prepare(tmp_path / "a.fasta", out, force=True, **SIZES)
    assert shards(out) != made


def test_letters_are_counted_in_the_shards(tmp_path: Path) -> None:
    manifest = prepare(write(tmp_path / "a.fasta"), tmp_path / "out", **SIZES)
    assert manifest.tallies["a.fasta"].letters_read == manifest.tallies["a.fasta"].letters_written == 18
    path = tmp_path / "out" / "manifest.json"
    path.write_text(re.sub(r'"letters_(read|written)": 18', r'"letters_\1": 19', path.read_text()))
    assert verify(tmp_path / "out") == ["a.fasta: 19 letters written, but the shards hold 18"]


def test_letters_of_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\nMK*\n>b\nMKVL\n>a\nMKVLA\n>c\nM\n>d\nMM\n")
    changes = {"on_duplicate": "skip", "on_letters": "strip", **SIZES}
    tally = prepare(tmp_path / "a.fasta", tmp_path / "out", **changes).tallies["a.fasta"]
    assert (tally.letters_read, tally.letters_written, tally.letters_dropped) == (15, 9, 6)


def test_lines_that_end_in_cr_alone(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\rMK\r>b\rMK\r")
    with pytest.raises(UserError, match=r"a\.fasta:1: lines end in CR alone"):
        prepare(tmp_path / "a.fasta", tmp_path / "out", **SIZES)


def test_a_gzipped_mapping(tmp_path: Path) -> None:
    write(tmp_path / "uniref50_train_filt.fasta")
    write(tmp_path / "uniref50_valid.fasta")
    (tmp_path / "uniref90membersandreps_ur50trainfiltreps.fasta").write_text(
        "".join(f">m{number}\nMKV\n" for number in range(6))
    )
    text = "cluster\tmembers\n" + "".join(f"p{number}\tm{number}\n" for number in range(6))
    (tmp_path / "mapping.tsv").write_bytes(gzip.compress(text.encode()))
    tallies = prepare_clusters(tmp_path, tmp_path / "out").tallies
    assert tallies["uniref50_train_filt.fasta"].written == 6
