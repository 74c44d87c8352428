# SPDX-License-Identifier: Apache-2.0
"""Data that is likely not what the user meant is told, a line each; sound data is not."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bionemo.config.compose import load
from bionemo.data.molecules.dataset import MoleculeSamples
from bionemo.data.proteins.splits import open_split
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES, ROOT
from tests.molecules import MOLECULES

RESIDUES, BASES = "LAGVSERTIDPKQNFYMHWC", "ACGT"


def texts(letters: str, number: int = 40, length: int = 50) -> list[str]:
    generator = random.Random(0)
    return ["".join(generator.choices(letters, k=length)) for _ in range(number)]


PROTEINS, DNA = texts(RESIDUES), texts(BASES)


def fasta(directory: Path, split: str, sequences: list[str], name: str = "x000") -> Path:
    path = directory / split / f"{name}.fasta"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(sequences)))
    return path


def notices(directory: Path, split: str = "train", files: str = "x000") -> list[str]:
    words = ["data@model.data=fasta", f"model.data.dataset_path={directory}", f"model.data.dataset.train={files}"]
    cfg = load("pretrain_small", words, EXAMPLES / "esm1nv" / "conf")
    return list(open_split(cfg.model.data, split, 62, load_tokenizer("esm1nv")).notices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        (DNA, "train data: 100.0% of the letters are A, C, G, T, U or N: these look like DNA or RNA, not proteins"),
        (texts("ACGU"), "these look like DNA or RNA, not proteins"),
        ([*DNA, *(text.lower() for text in DNA)], "these look like DNA or RNA, not proteins"),
        (MOLECULES * 3, "% of the letters are brackets, bonds and digits: these look like SMILES, not proteins"),
        (
            [*PROTEINS, PROTEINS[0].lower()],
            "train data: 50 of 2,050 letters are lower case, which the vocabulary does not have: each run of them is "
            "read as one unknown token; write the sequences in upper case",
        ),
        ([*PROTEINS, "X" * 30, "X"], "train data: 2 of 42 sequences looked at consist of X alone: leave them out"),
    ],
    ids=["DNA", "RNA", "lower-case DNA", "SMILES", "lower case", "X"],
)
def test_sequences_that_are_no_proteins_are_told(tmp_path: Path, sequences: list[str], said: str) -> None:
    fasta(tmp_path, "train", sequences)
    found = notices(tmp_path)
    assert len([line for line in found if said in line]) == 1, found
    assert all("\n" not in line for line in found)


@pytest.mark.parametrize("sequences", [PROTEINS, ["MKV", "GGG"], ["A" * 60], [*PROTEINS, "MXXXXXXXXXX"]])
def test_sound_proteins_are_not_commented(tmp_path: Path, sequences: list[str]) -> None:
    fasta(tmp_path, "train", sequences)
    fasta(tmp_path, "val", PROTEINS[::-1])
    assert notices(tmp_path) == notices(tmp_path, "val") == []


@pytest.mark.parametrize("copy", [shutil.copy, os.link, os.symlink], ids=["copy", "hard link", "link"])
def test_files_that_are_given_twice_are_told(tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
    path = fasta(tmp_path, "train", PROTEINS)
    fasta(tmp_path, "train", PROTEINS[::-1], "x001")  # as large, but another
    assert notices(tmp_path, files="x[000..001]") == []
    copy(path, path.with_name("x002.fasta"))
    (found,) = notices(tmp_path, files="x[000..002]")
    assert (
        found == f"train data: {path.with_name('x002.fasta')} has the same content as {path}: its records count twice"
    )
    assert len(notices(tmp_path, files="[x000,x000]")) == 1


def test_validation_on_the_training_data_is_told(tmp_path: Path) -> None:
    train, val = fasta(tmp_path, "train", PROTEINS), fasta(tmp_path, "val", PROTEINS)
    assert notices(tmp_path) == []
    (found,) = notices(tmp_path, "val")
    assert found.startswith(f"val data: {val} has the same content as {train}, which the model is trained on")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (PROTEINS, "train data: 40 of 40 records looked at look like protein sequences, not like SMILES"),
        (DNA, "train data: 40 of 40 records looked at look like DNA or RNA, not like SMILES"),
        (MOLECULES, None),
    ],
)
def test_what_is_no_molecule_is_told(tmp_path: Path, records: list[str], said: str | None) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        lines = "".join(f'{number},"{text}"\n' for number, text in enumerate(records))
        (tmp_path / split / "x000.csv").write_text(f"zinc_id,smiles\n{lines}")
    words = [f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000", "model.data.dataset.val=x000"]
    cfg = load("pretrain_xsmall_span_aug", words, ROOT / "examples" / "molecule" / "megamolbart" / "conf")
    found = MoleculeSamples.open(cfg.model, load_tokenizer("megamolbart"), "train").notices
    assert [line for line in found if "look like" in line] == ([said] if said else [])
    found = MoleculeSamples.open(cfg.model, load_tokenizer("megamolbart"), "val").notices
    assert len([line for line in found if "which the model is trained on" in line]) == 1
