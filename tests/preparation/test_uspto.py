# SPDX-License-Identifier: Apache-2.0
"""Reactions to splits: unmapped and canonical, from all public formats, and never from a pickle."""

import csv
import gzip
import pickle
import re
from pathlib import Path

import pytest
from rdkit import Chem

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import UsptoJob
from bionemo.preparation import uspto
from bionemo.preparation.manifest import Manifest, verify
from bionemo.preparation.uspto import prepare
from bionemo.tokenizers.smiles import megamolbart

ESTER = "[CH3:1][C@@H:2]([F:9])[C:3](=[O:4])[OH:7].[OH:5][CH3:6]>>[CH3:1][C@@H:2]([F:9])[C:3](=[O:4])[O:5][CH3:6]"
AMIDE = "[CH3:1][C:2](=[O:3])[Cl:7].[NH2:4][c:5]1[cH:6][cH:8][cH:9][cH:10][cH:11]1>>" \
        "[CH3:1][C:2](=[O:3])[NH:4][c:5]1[cH:6][cH:8][cH:9][cH:10][cH:11]1"  # fmt: skip
ALKENE = "[CH3:1]/[CH:2]=[CH:3]\\[CH2:4][Br:5].[OH2:6]>>[CH3:1]/[CH:2]=[CH:3]\\[CH2:4][OH:6]"
NAMES = ("train", "val", "test")
HEADER = ["reaction_type", "set", "reactants", "products"]


def job(source: Path, output: Path, **changed: object) -> UsptoJob:
    settings: dict[str, object] = {
        **{
            "_target_": "",
            "output": str(output),
            "force": False,
            "num_preprocess_workers": 1,
            "engine": "local",
            "source": str(source),
        },
        **{"checksum": None, "on_invalid": "error"},
    }
    return UsptoJob(**(settings | changed))  # type: ignore[arg-type]


def sides(reaction: str) -> tuple[str, str]:
    """Remove the map numbers of both sides from the text."""
    reactants, products = (Chem.CanonSmiles(re.sub(r":\d+\]", "]", side)) for side in reaction.split(">>"))
    return reactants, products


def split(output: Path, name: str) -> list[list[str]]:
    with (output / name / "data.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == HEADER
    return rows


def raw_files(directory: Path, reactions: dict[str, list[str]]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, rows in reactions.items():
        lines = [f"US{number},{number % 10 + 1},{reaction}" for number, reaction in enumerate(rows)]
        (directory / f"raw_{name}.csv").write_text("\n".join(["id,class,reactants>reagents>production", *lines, ""]))
    return directory


def test_the_three_files_of_the_public_release(tmp_path: Path) -> None:
    source = raw_files(tmp_path / "in", {"train": [ESTER, AMIDE, ALKENE], "val": [AMIDE], "test": [ESTER, ALKENE]})
    prepare(job(source, tmp_path / "out"))
    assert split(tmp_path / "out", "train") == [
        ["<RX_1>", "train", *sides(ESTER)], ["<RX_2>", "train", *sides(AMIDE)], ["<RX_3>", "train", *sides(ALKENE)]
    ]  # fmt: skip
    assert split(tmp_path / "out", "val") == [["<RX_1>", "val", *sides(AMIDE)]]
    assert [row[1:] for row in split(tmp_path / "out", "test")] == [["test", *sides(ESTER)], ["test", *sides(ALKENE)]]
    assert sides(AMIDE) == ("CC(=O)Cl.Nc1ccccc1", "CC(=O)Nc1ccccc1")  # written by hand
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("suffix", ["", "_mol"])
@pytest.mark.parametrize("end", [".csv", ".tsv", ".csv.gz"])
def test_one_file_with_a_column_for_the_set(tmp_path: Path, suffix: str, end: str) -> None:
    header = ["", "reaction_type", "set", f"products{suffix}", f"reactants{suffix}"]
    rows = [
        [number, kind, name, *reversed(reaction.split(">>"))]
        for number, kind, name, reaction in (
            ("0", "<RX_6>", "valid", AMIDE),
            ("1", "<RX_2>", "train", ESTER),
            ("2", "<RX_2>", "test", ALKENE),
        )
    ]
    text = "".join(("\t" if end == ".tsv" else ",").join(row) + "\n" for row in [header, *rows]).encode()
    path = tmp_path / f"uspto{end}"
    path.write_bytes(gzip.compress(text) if end.endswith("gz") else text)
    prepare(job(path, tmp_path / "out"))
    assert [split(tmp_path / "out", name) for name in NAMES] == [
        [["<RX_2>", "train", *sides(ESTER)]], [["<RX_6>", "val", *sides(AMIDE)]], [["<RX_2>", "test", *sides(ALKENE)]]
    ]  # fmt: skip
    assert verify(tmp_path / "out") == []


def test_workers_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = raw_files(tmp_path / "in", {"train": [ESTER, AMIDE, ALKENE] * 7, "val": [AMIDE], "test": [ESTER]})
    prepare(job(source, tmp_path / "one"))
    monkeypatch.setattr(uspto, "_TASK_SIZE", 2)
    prepare(job(source, tmp_path / "two", num_preprocess_workers=2))
    assert len(split(tmp_path / "one", "train")) == 21
    for name in NAMES:
        assert split(tmp_path / "one", name) == split(tmp_path / "two", name)


def test_reagents_are_dropped_and_counted(tmp_path: Path) -> None:
    source = raw_files(
        tmp_path / "in", {"train": ["CO.CC(=O)O>[Na+].[Cl-]>CC(=O)OC"], "val": [AMIDE], "test": [ESTER]}
    )
    prepare(job(source, tmp_path / "out"))
    assert split(tmp_path / "out", "train") == [["<RX_1>", "train", "CC(=O)O.CO", "COC(C)=O"]]
    manifest = Manifest.read(tmp_path / "out")
    assert manifest is not None
    assert manifest.tallies[str(source / "raw_train.csv")].changed == {"without their reagents": 1}


def test_an_unreadable_molecule_is_named_or_skipped(tmp_path: Path) -> None:
    source = raw_files(tmp_path / "in", {"train": [ESTER, "C1CC>>CC", AMIDE], "val": [AMIDE], "test": ["CC>>C(C)(C"]})
    with pytest.raises(UserError) as error:
        prepare(job(source, tmp_path / "error"))
    assert str(error.value).startswith(f"{source / 'raw_train.csv'}:3: RDKit cannot read the SMILES 'C1CC': ")
    prepare(job(source, tmp_path / "skip", on_invalid="skip"))
    assert [len(split(tmp_path / "skip", name)) for name in NAMES] == [2, 1, 0]


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


@pytest.mark.parametrize("name", ["uspto_50.pickle", "uspto_50.csv"])
def test_a_pickle_is_refused_whatever_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"is a pickle.*MolToSmiles.*to_csv") as error:
        prepare(job(tmp_path / name, tmp_path / "out"))
    assert "\n" not in str(error.value) and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("reactants,set\nC,train\n", r"x\.csv:1: no column products, only reactants, set"),
        ("reactants,products,set\nC,C,train\nC,C,new\n", r"x\.csv:3: set 'new' is not known"),
        ("reactants,products,set\nC,C\n", r"x\.csv:2: the row is incomplete: fill in reactants, products, set"),
        ("reactants,products,set\n", r"x\.csv contains no reactions"),
        ("reactants>reagents>production,set\nC>C,train\n", r"x\.csv:2: 'C>C' is not a reaction"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(job(tmp_path / "x.csv", tmp_path / "out"))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"raw_train\.csv does not exist"):
        prepare(job(tmp_path, tmp_path / "out"))


def test_known_tokens_stay_known_at_metals(tmp_path: Path) -> None:
    """Releases of RDKit since 2025.3 write brackets around neighbours of metals, which are not in the vocabulary."""
    reactions = [
        ("C[Mg+].O=Cc1ccccc1", "CC(O)c1ccccc1"),
        ("[Mg+]c1ccccc1.C=O", "OCc1ccccc1"),
        ("CCOC(=O)C[Zn]Br.Brc1ccccc1", "CCOC(=O)Cc1ccccc1"),
        ("[Li]CCCC.C[Si](C)(C)Cl", "CCCC[Si](C)(C)C"),
    ]
    lines = [f"1,train,{reactants},{products}" for reactants, products in reactions]
    (tmp_path / "x.csv").write_text("\n".join(["reaction_type,set,reactants,products", *lines]))
    prepare(job(tmp_path / "x.csv", tmp_path / "out"))
    rows = split(tmp_path / "out", "train")
    vocabulary = megamolbart()
    for (reactants, products), row in zip(reactions, rows, strict=True):
        assert vocabulary.find_unknown(row[2] + row[3]) == vocabulary.find_unknown(reactants + products)
        assert [Chem.CanonSmiles(text) for text in row[2:]] == [
            Chem.CanonSmiles(text) for text in (reactants, products)
        ]
