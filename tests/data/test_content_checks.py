# SPDX-License-Identifier: Apache-2.0
"""Warnings about unsuitable data, one line each; suitable data causes none."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bionemo.config.compose import load
from bionemo.data.molecules.dataset import MoleculeDataset
from bionemo.data.proteins.splits import open_split
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES, ROOT
from tests.support.molecules import MOLECULES

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


def notes(directory: Path, split: str = "train", files: str = "x000") -> list[str]:
    overrides = ["data@model.data=fasta", f"model.data.dataset_path={directory}", f"model.data.dataset.train={files}"]
    cfg = load("pretrain_small", overrides, EXAMPLES / "esm1nv" / "conf")
    return list(open_split(cfg.model.data, split, 62, load_tokenizer("esm1nv")).notes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "warning"),
    [
        (DNA, "train data: only A, C, G, T, U and N in 40 of 40 sequences, the first record 0: is this DNA or RNA?"),
        (
            [*texts("ACGU"), *(text.lower() for text in DNA)],
            "only A, C, G, T, U and N in 80 of 80 sequences, the first",
        ),
        (MOLECULES * 3, "train data: letters unknown to the model, each read as an unknown residue: "),
        (
            [*PROTEINS, PROTEINS[0].lower()],
            "train data: lower-case letters, read as residues: 50 (in 1 of 41 sequences, the first record 40)",
        ),
    ],
    ids=["DNA", "RNA and lower-case DNA", "SMILES", "lower case"],
)
def test_warnings_about_sequences_that_are_not_proteins(tmp_path: Path, sequences: list[str], warning: str) -> None:
    fasta(tmp_path, "train", sequences)
    found = notes(tmp_path)
    assert len([line for line in found if warning in line]) == 1, found
    assert all("\n" not in line for line in found)


@pytest.mark.parametrize("sequences", [PROTEINS, ["MKV", "GGG"], ["A" * 60], [*PROTEINS, "MXXXXXXXXXX"]])
def test_no_notes_about_suitable_proteins(tmp_path: Path, sequences: list[str]) -> None:
    fasta(tmp_path, "train", sequences)
    fasta(tmp_path, "val", PROTEINS[::-1])
    assert notes(tmp_path) == notes(tmp_path, "val") == []


@pytest.mark.parametrize("copy", [shutil.copy, os.link, os.symlink], ids=["copy", "hard link", "link"])
def test_note_about_duplicate_files(tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
    path = fasta(tmp_path, "train", PROTEINS)
    fasta(tmp_path, "train", PROTEINS[::-1], "x001")  # a different file of equal size
    assert notes(tmp_path, files="x[000..001]") == []
    copy(path, path.with_name("x002.fasta"))
    (found,) = notes(tmp_path, files="x[000..002]")
    assert (
        found == f"train data: {path.with_name('x002.fasta')} has the same content as {path}: its records count twice"
    )
    assert len(notes(tmp_path, files="[x000,x000]")) == 1


def test_note_about_validation_on_training_data(tmp_path: Path) -> None:
    train, val = fasta(tmp_path, "train", PROTEINS), fasta(tmp_path, "val", PROTEINS)
    assert notes(tmp_path) == []
    (found,) = notes(tmp_path, "val")
    assert found.startswith(f"val data: {val} has the same content as the training file {train}: the val loss")


def test_note_about_molecules_of_the_training_data(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        lines = "".join(f'{number},"{text}"\n' for number, text in enumerate(MOLECULES))
        (tmp_path / split / "x000.csv").write_text(f"zinc_id,smiles\n{lines}")
    overrides = [f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000", "model.data.dataset.val=x000"]
    cfg = load("pretrain_xsmall_span_aug", overrides, ROOT / "examples" / "molecule" / "megamolbart" / "conf")
    found = MoleculeDataset.open(cfg.model, load_tokenizer("megamolbart"), "val").notes
    assert len([line for line in found if "as the training file" in line]) == 1
