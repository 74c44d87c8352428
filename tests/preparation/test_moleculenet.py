# SPDX-License-Identifier: Apache-2.0
"""Tables of measured properties: rows are unchanged, and each is in the expected split."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import MoleculeNetJob
from bionemo.data.molecules.scaffolds import divide_by_scaffold
from bionemo.preparation.manifest import Manifest, verify
from bionemo.preparation.moleculenet import prepare
from tests.conftest import ROOT

HEADER = ["iupac", "smiles", "expt", "calc"]
ROWS = [[f'{number}-"al", {number}', "OC" + "C" * number, f"-{number}.10", f"{number}e0 "] for number in range(20)]


def job(source: Path | str, output: Path, **changed: object) -> MoleculeNetJob:
    settings: dict[str, object] = {
        **{
            "_target_": "",
            "output": str(output),
            "force": False,
            "num_preprocess_workers": 1,
            "engine": "local",
            "source": str(source),
        },
        **{"task_name": "FreeSolv", "val_size": 0.15, "test_size": 0.25, "seed": 0, "on_invalid": "error"},
        "split": "random",
    }
    return MoleculeNetJob(**(settings | changed))  # type: ignore[arg-type]


def table(path: Path, header: list[str], rows: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, rows


def test_each_split_holds_its_rows_unchanged(tmp_path: Path) -> None:
    table(tmp_path / "in" / "SAMPL.csv", HEADER, ROWS)
    prepare(job(tmp_path / "in", tmp_path / "out"))
    # expected permutation of range(20) by default_rng(0): the first 3 are validation, the next 5 are test
    order = [4, 19, 6, 2, 13, 16, 3, 11, 10, 8, 0, 12, 7, 5, 18, 17, 14, 9, 1, 15]
    shuffled = np.arange(20)
    np.random.default_rng(0).shuffle(shuffled)
    assert shuffled.tolist() == order
    for split, indices in {"val": order[:3], "test": order[3:8], "train": order[8:]}.items():
        header, rows = read(tmp_path / "out" / "FreeSolv" / split / "x000.csv")
        assert header == HEADER and rows == [ROWS[index] for index in indices], split
    assert verify(tmp_path / "out" / "FreeSolv") == []


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_molecule_are_in_one_split(seed: int, tmp_path: Path) -> None:
    """Each molecule is written from either end; other rows stay where they are without repetitions."""
    rows = [[f"C{'C' * number}O", str(number)] for number in range(20)]
    rows += [[text[::-1], value] for text, value in rows[::2]]
    table(tmp_path / "in" / "ESOL.csv", ["smiles", "y"], rows)
    prepare(job(tmp_path / "in", tmp_path / "out", task_name="ESOL", seed=seed))
    found = {split: read(tmp_path / "out" / "ESOL" / split / "x000.csv")[1] for split in ("val", "test", "train")}
    assert sorted(row for each in found.values() for row in each) == sorted(rows)
    lengths = [{row[1] for row in each} for each in found.values()]
    assert len(set.union(*lengths)) == sum(map(len, lengths)) == 20
    assert len(found["val"]) in (4, 5) and len(found["test"]) in (7, 8, 9)


def test_scaffolds(tmp_path: Path) -> None:
    rings = ["c1ccccc1", "C1CCCC1", "c1ccncc1", "c1ccoc1", "C1CC1", ""]
    rows = [[f"{'C' * (1 + n)}{rings[n * n % 6]}", str(n)] for n in range(40)]
    table(tmp_path / "in" / "ESOL.csv", ["smiles", "y"], rows)
    prepare(job(tmp_path / "in", tmp_path / "out", task_name="ESOL", val_size=0.1, test_size=0.1, split="scaffold"))
    expected = divide_by_scaffold([row[0] for row in rows], 0.1, 0.1)
    for split in ("train", "val", "test"):
        path = tmp_path / "out" / "ESOL" / split / "x000.csv"
        assert read(path)[1] == [row for row, each in zip(rows, expected, strict=True) if each == split]
    manifest = Manifest.read(tmp_path / "out" / "ESOL")
    assert manifest is not None and manifest.parameters["split"] == "scaffold"
    with pytest.raises(UserError, match="split"):
        prepare(job(tmp_path / "in", tmp_path / "out", task_name="ESOL", val_size=0.1, test_size=0.1))


def test_all_tasks_by_either_name_of_their_file(tmp_path: Path) -> None:
    table(tmp_path / "in" / "ESOL.csv", ["SMILES", "y"], [row[1:3] for row in ROWS])
    table(tmp_path / "in" / "SAMPL.csv", HEADER, ROWS)
    table(tmp_path / "in" / "Lipophilicity.csv", ["id", "exp", "Smiles"], [["a,b", row[2], row[1]] for row in ROWS])
    prepare(job(tmp_path / "in", tmp_path / "out", task_name="all", val_size=4, test_size=6))
    for task in ("ESOL", "FreeSolv", "Lipophilicity"):
        sizes = [len(read(tmp_path / "out" / task / split / "x000.csv")[1]) for split in ("train", "val", "test")]
        assert sizes == [10, 4, 6]
    prepare(job(tmp_path / "in", tmp_path / "out", task_name=["SAMPL"], val_size=4, test_size=6))
    assert read(tmp_path / "out/SAMPL/val/x000.csv") == read(tmp_path / "out/FreeSolv/val/x000.csv")


def test_an_unreadable_molecule_is_named_or_skipped(tmp_path: Path) -> None:
    path = table(tmp_path / "SAMPL.csv", HEADER, [*ROWS[:5], ["x", "C1CC", "1", "2"], *ROWS[5:]])
    with pytest.raises(UserError) as error:
        prepare(job(tmp_path, tmp_path / "error"))
    assert str(error.value).startswith(f"{path}:7: RDKit cannot read the SMILES 'C1CC': ")
    prepare(job(tmp_path, tmp_path / "skip", on_invalid="skip"))
    manifest = Manifest.read(tmp_path / "skip" / "FreeSolv")
    assert manifest is not None
    tally = manifest.tallies["FreeSolv"]
    assert (tally.read, tally.written, tally.dropped) == (21, 20, {"invalid SMILES": 1})


@pytest.mark.parametrize(
    ("content", "changed", "message"),
    [
        ("a,b\n1,2\n", {}, r"SAMPL\.csv:1: no column smiles"),
        ("smiles,b\nC,1\nC\n", {}, r"SAMPL\.csv:3: the row is incomplete: fill in smiles, b"),
        ("smiles,b\n", {}, r"SAMPL\.csv contains no rows"),
        ("smiles,b\nC,1\nN,2\n", {"val_size": 1, "test_size": 1}, "leave no training records of 2"),
        ("smiles,b\nC,1\n", {"task_name": "HIV"}, "task_name=HIV is not known: choose ESOL, FreeSolv"),
        ("smiles,b\nC,1\n", {"task_name": "ESOL"}, r"delaney-processed\.csv does not exist"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, content: str, changed: dict[str, object], message: str) -> None:
    (tmp_path / "SAMPL.csv").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(job(tmp_path, tmp_path / "out", **changed))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not (ROOT.parent / "shared" / "data").is_dir(), reason="needs the shared data")
def test_esol(tmp_path: Path) -> None:
    source = ROOT.parent / "shared" / "data" / "molecules"
    prepare(job(source, tmp_path / "out", task_name="ESOL"))
    header, expected = read(source / "ESOL.csv")
    found = [read(tmp_path / "out" / "ESOL" / split / "x000.csv") for split in ("train", "val", "test")]
    assert all(each == header for each, _ in found)
    assert sorted(row for _, rows in found for row in rows) == sorted(expected)
