# SPDX-License-Identifier: Apache-2.0
"""The commands read the same protein from other spellings, and note unknown letters in one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bionemo.cli import analysis as command
from tests.support.huggingface import theirs

WILD_TYPE = "MKTAYIAKQRQISFVKSHFS"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    theirs(path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bionemo analysis", *map(str, arguments)])
    command.main()


@pytest.fixture
def console(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> pytest.CaptureFixture[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head.json").write_text(json.dumps({"weight": [0.1 * n for n in range(8)], "bias": 0.0}))
    return capsys


def read_notes(console: pytest.CaptureFixture[str]) -> list[str]:
    lines = console.readouterr().err.splitlines()
    return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def test_contacts(
    path: Path, console: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.fasta").write_text(f">a\n{WILD_TYPE}\n>b\n{' '.join(WILD_TYPE.lower())}*\n>c\nMK:V\n>d\nM:JV\n")
    given = ("--model", path, "--head", "head.json", "--input", "x.fasta", "--output", "out")
    run(monkeypatch, "contacts", *given)
    assert (tmp_path / "out" / "a.csv").read_text() == (tmp_path / "out" / "b.csv").read_text()
    assert np.loadtxt(tmp_path / "out" / "c.csv", delimiter=",", skiprows=1)[:, :2].max() == 4  # ':' has position 3
    stop, letters = read_notes(console)
    assert stop.startswith("x.fasta: the '*' at the end of 1 of 4 sequences is dropped")
    assert "unknown residue: ':' 2, 'J' 1 (in 2 of 4 sequences, the first x.fasta: c); lower-case letters" in letters


@pytest.mark.parametrize("wild_type", [WILD_TYPE.lower(), f"{WILD_TYPE}*", " ".join(WILD_TYPE), "wt.fasta"])
def test_variants_and_scans(
    wild_type: str, path: Path, console: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("variant\nK2A\nA4G:S20C\n")
    (tmp_path / "wt.fasta").write_text(f">wt\n{WILD_TYPE[:9]}\n{WILD_TYPE[9:].lower()} *\n")
    for name, sequence in (("one", WILD_TYPE), ("two", wild_type)):
        given = ("variants", "--model", path, "--sequence", sequence)
        run(monkeypatch, *given, "--variants", "x.csv", "--output", f"{name}.csv")
        run(monkeypatch, *given, "--scan", "--output", f"{name}_scan.csv")
    for name in ("", "_scan"):
        assert (tmp_path / f"one{name}.csv").read_text() == (tmp_path / f"two{name}.csv").read_text()
    assert sum("lower-case" in note for note in read_notes(console)) == 2 * (wild_type.islower())


def test_maps(
    path: Path, console: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = [WILD_TYPE[n:] for n in range(5)]
    (tmp_path / "x.fasta").write_text("".join(f">{n}\n{text}\n" for n, text in enumerate(texts)))
    (tmp_path / "y.fasta").write_text("".join(f">{n}\n{' '.join(text).lower()}\n" for n, text in enumerate(texts)))
    for name in "xy":
        given = ("--model", path, "--method", "pca", "--input", f"{name}.fasta", "--output", f"{name}.csv")
        run(monkeypatch, "map", *given)
    assert (tmp_path / "x.csv").read_text() == (tmp_path / "y.csv").read_text()
    (note,) = read_notes(console)
    assert note.startswith("lower-case letters, read as residues: 90 (in 5 of 5 sequences, the first y.fasta: 0)")


@pytest.mark.parametrize("name", ["contacts", "map", "variants"])
def test_special_tokens_are_refused(
    name: str, path: Path, console: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "x.fasta").write_text(">a\nMKV\n>b\nMK<mask>V\n")
    given = {
        "contacts": ("--head", "head.json", "--input", "x.fasta"), "map": ("--method", "pca", "--input", "x.fasta"),
        "variants": ("--scan", "--sequence", "x.fasta"),
    }[name]  # fmt: skip
    with pytest.raises(SystemExit):
        run(monkeypatch, name, "--model", path, "--output", "out.csv", *given)
    assert "x.fasta:4 contains '<mask>': special tokens are not read from text" in capsys.readouterr().err
