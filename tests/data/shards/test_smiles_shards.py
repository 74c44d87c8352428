# SPDX-License-Identifier: Apache-2.0
"""SMILES files of other programs: the columns, the names, and what is skipped; all readers agree."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.data.columns import find_id_column, find_sequence_columns
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.smiles_format import find_formats
from bionemo.finetuning.load_head import read_records
from bionemo.preparation.molecules import read_smiles

ETHANOL, RING, ACID = ("CCO", "ethanol"), ("c1ccccc1", "benzene, pure"), ("CC(=O)O", "acetic acid")
THREE = [ETHANOL, RING, ACID]
PLAIN = "CCO ethanol\nc1ccccc1 benzene, pure\nCC(=O)O acetic acid\n"
FILES = {
    "plain": (PLAIN, THREE),
    "RDKit's title": (f"SMILES Name \n{PLAIN}", THREE),
    "ZINC15's title": (f"smiles zinc_id\n{PLAIN}", THREE),
    "title in upper case, with a tab": ("SMILES\tNAME\nCCO\tethanol\n", [ETHANOL]),
    "byte order mark, CR LF, no line end": ("\ufeff" + PLAIN.strip().replace("\n", "\r\n"), THREE),
    "blank lines and comments": ("# from a program\n\n" + PLAIN.replace("\n", "\n\n#x y\n  \n"), THREE),
    "several spaces and tabs": (PLAIN.replace(" ", " \t  ", 1).replace("CC(=O)O", " CC(=O)O"), THREE),
    "quotes": ('CCO "ethanol"\nC 5"-deoxy, \'x\'\n', [("CCO", '"ethanol"'), ("C", "5\"-deoxy, 'x'")]),
    "names in some lines": ("C\nCCO ethanol\nN\n", [("C", ""), ETHANOL, ("N", "")]),
    "first lines that are words": ("CN amine\nNO x\nC smiles\n", [("CN", "amine"), ("NO", "x"), ("C", "smiles")]),
    "tabs in names": ("CCO\tid1\t3.5\nC\tid2\n", [("CCO", "id1\t3.5"), ("C", "id2")]),
    "invalid first": ("c1ccccc x\nCCO ethanol\n", [("c1ccccc", "x"), ETHANOL]),
    "extensions": ("CCO |$_R1;;$,c:1| ethanol\nC |o1:0|\nN |x\n", [ETHANOL, ("C", ""), ("N", "|x")]),
    "extensions in a table": (
        "SMILES\tID\nCCO |&1:1|\tZ 1\n C \tZ2\nCC |f:0.1, 2|\tx\n", [("CCO", "Z 1"), ("C", "Z2"), ("CC", "x")]
    ),
    "PubChem": ("1\tCCO\n22\tC\n", [("CCO", "1"), ("C", "22")]),
    "ChEMBL": ("chembl_id\tcanonical_smiles\tstandard_inchi\nCHEMBL5\tCCO\tInChI=1S/x\n", [("CCO", "CHEMBL5")]),
    "ids that resemble SMILES": ("C001\tCCO\nC002\tCCN\n", [("CCO", "C001"), ("CCN", "C002")]),
    "id first, spaces": ("ID SMILES\nZINC1 CCO\nZINC2 C\n", [("CCO", "ZINC1"), ("C", "ZINC2")]),
    "a title that is a SMILES": ("N SMILES\n1 CCO\n2 C\n", [("CCO", "1"), ("C", "2")]),
    "commented title": ("#SMILES Name\nCCO ethanol\n", [ETHANOL]),
    "commas": ('id,IsomericSMILES,x\na,CCO,1\n"b, c",C,2\n', [("CCO", "a"), ("C", "b, c")]),
    "commas without title": ("CCO,ethanol\nC,m\n", [ETHANOL, ("C", "m")]),
    "semicolons": ('"ChEMBL ID";"Name";"Smiles"\n"CHEMBL5";"a;b";"CCO"\n', [("CCO", "CHEMBL5")]),
    "spaces in titles": ("Compound ID,log P,smiles\nAmine 1,2.5,CN\n", [("CN", "Amine 1")]),
    "unknown titles": ("key\tstructure\tvalue\nx1\tCCO\t2\nx2\tC\t3\n", [("CCO", ""), ("C", "")]),
    "other column": ("canonical_smiles\tSMILES\tCID\nOCC\tCCO\t7\n", [("CCO", "7")]),
    "title only of SMILES": ("smiles\nCCO\nC\n", [("CCO", ""), ("C", "")]),
    "empty cells": ("zinc_id\tx\tsmiles\nZ1\t\tCCO\nZ2\t1\t C \n", [("CCO", "Z1"), ("C", "Z2")]),
}  # fmt: skip


def open_smiles(path: Path, *columns: str | int | None) -> TextRecords:
    return TextRecords([path], find_formats([path], *columns))


def read_indexed(path: Path) -> list[tuple[str, str]]:
    source = open_smiles(path)
    found = [source.fields(number) for number in range(len(source))]
    assert [source.text(number).strip() for number in range(len(source))] == [each["sequence"] for each in found]
    return [(each["sequence"], each.get("id", "")) for each in found]


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    """The indexed reader, the sequential one and that of `label` return the same records."""
    text, expected = FILES[name]
    path = tmp_path / "x.smi"
    path.write_text(text, newline="")
    assert read_indexed(path) == expected
    rows = [row for block in read_smiles([(path, "x.smi")]) for row in block.rows()]
    assert [smiles for _, smiles, _ in rows] == [smiles for smiles, _ in expected]
    numbered = [(f"0-{line}", f"{number}") for number, (line, _, _) in enumerate(rows)]
    assert [each for _, _, each in rows] == [
        names or line for (_, names), (line, _) in zip(expected, numbered, strict=True)
    ]
    ids, texts = read_records(path)
    assert texts == [smiles for smiles, _ in expected]
    assert ids == [names or number for (_, names), (_, number) in zip(expected, numbered, strict=True)]


def test_a_column_can_be_given_by_title_or_number(tmp_path: Path) -> None:
    path = tmp_path / "x.smi"
    path.write_text("name\traw\tsmiles\tbatch\na\tOCC\tCCO\tb1\nb\tNCC\tCCN\tb2\n")
    for smiles in ("raw", "1", 1):
        source = open_smiles(path, "key", smiles, "batch")
        assert source.fields(1) == {"sequence": "NCC", "id": "b2"}
    source = open_smiles(path, "key", "sequence", "id")  # defaults of `predict`
    assert source.fields(0) == {"sequence": "CCO", "id": "a"}
    path.write_text("smiles zinc_id\nCCO a b\nC\n")  # names of v1's configuration, which need not be in the file
    source = open_smiles(path, "key", "smiles", "zinc_id")
    assert [source.fields(number)["id"] for number in range(2)] == ["a b", ""]
    path.write_text("name\traw\tsmiles\tbatch\na\tOCC\tCCO\tb1\nb\tNCC\tCCN\tb2\n")
    with pytest.raises(UserError, match=r"x\.smi has no column 'curated'.*set key to its title"):
        open_smiles(path, "key", "curated")
    with pytest.raises(UserError, match=r"no SMILES in column 4 of .*x\.smi \(first line .*set key to its title"):
        open_smiles(path, "key", "3")
    with pytest.raises(
        UserError, match=r"x\.smi has no column 'plate', but 'name', 'raw'.*: correct the column of the ids"
    ):
        open_smiles(path, "key", "raw", "plate")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MKTA a\nGSHM b\n", r"no SMILES in column 1 of .*x\.smi \(first line 'MKTA a'\)"),
        (b"C a\rN b\r", "x.smi:1: a carriage return inside a line"),
        (b"C a\nN \xe9\n", "x.smi:2: text that is not UTF-8"),
        (b"ID SMILES\na C\nb c N\n", "x.smi:3: 3 columns instead of 2: separate the columns with tabs"),
        (b"id\tsmiles\na\tC\nb\n", r"x.smi:3: a line without a SMILES \(1 of 2 columns\): complete the line"),
        (b"smiles\tid\nC\ta\nN\n", r"x.smi:3: a molecule without an id \(1 of 2 columns\)"),
        (b"SMILES Name\n\n# x\n", "x.smi contains no records"),
        (b"", "x.smi is empty"),
    ],
)
def test_mistakes_name_file_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.smi"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        open_smiles(path)
    assert "\n" not in str(error.value)
    if b"SMILES Name" in content or not content:
        assert not [row for block in read_smiles([(path, str(path))]) for row in block.rows()]
    else:
        with pytest.raises(UserError, match=message):
            list(row for block in read_smiles([(path, str(path))]) for row in block.rows())


def test_files_with_different_columns(tmp_path: Path) -> None:
    for name, text in {"a": "SMILES Name\nC a\n", "b": "name,smiles\nb,N\n", "c": "O c\n"}.items():
        (tmp_path / f"{name}.smi").write_text(text)
    paths = sorted(tmp_path.glob("*.smi"))
    source = TextRecords(paths, find_formats(paths))
    assert [source.fields(number) for number in range(3)] == [
        {"sequence": smiles, "id": name} for smiles, name in ("Ca", "Nb", "Oc")
    ]


def test_titles_that_are_not_known_and_extensions_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.smi"
    path.write_text("structure label\nCCO |$R1;;$| a\nC b\n")
    open_smiles(path)
    assert caplog.messages == [
        f"{path}: extensions of CXSMILES (|...|) are not read",
        f"{path}:1: 'structure label' is read as a line of titles",
    ]


def test_columns_of_tables() -> None:
    for titles, sequence, name in (
        (["ID", "Sequence", "ligand_smiles"], [1], 0),  # a protein with its ligand
        (["CanonicalSMILES", "Molecule ChEMBL ID"], [0], 1),
        (["isomeric_smiles", "SMILES", "Name"], [1], 2),
        (["Ligand SMILES", "x"], [0], None),
        (["smiles_count", "y"], [], None),
        (["cid", "canonicalsmiles", "isosmiles", "iupacname"], [2], 0),  # PubChem
        (["CanonicalSMILES", "IsomericSMILES"], [1], None),
        (["Entry Name", "Entry", "Sequence"], [2], 1),  # UniProt
        (["UniProt ID", "seq"], [1], 0),
        (["Accession", "seq"], [1], 0),
        (["protein_id", "seq"], [1], 0),
        (["PDB_ID", "seq"], [1], 0),
    ):
        assert (find_sequence_columns(titles), find_id_column(titles)) == (sequence, name)
    assert find_id_column(["accession", "smiles"], proteins=False) is None


@pytest.mark.parametrize(
    ("titles", "protein", "molecule"),
    [
        (["Drug_ID", "Drug", "Target_ID", "Target", "Y"], 3, 1),  # Therapeutics Data Commons
        (["Ligand SMILES", "BindingDB Target Chain Sequence"], 1, 0),
        (["Ligand SMILES", "BindingDB Target Chain  Sequence 1", "BindingDB Target Chain  Sequence 2"], 1, 0),
        (["compound_iso_smiles", "target_sequence", "affinity"], 1, 0),
        (["smiles", "sequence"], 1, 0),
    ],
)
def test_columns_of_tables_of_proteins_and_molecules(titles: list[str], protein: int, molecule: int) -> None:
    assert find_sequence_columns(titles, proteins=True) == [protein]
    assert find_sequence_columns(titles, proteins=False) == [molecule]
