# SPDX-License-Identifier: Apache-2.0
"""Configured columns are compared with the headers and the first records of CSV files."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.data.columns import PROTEINS, SMILES, CsvColumns, SequenceKind, check_columns
from bionemo.data.molecules.dataset import MoleculeDataset
from bionemo.data.proteins.splits import Split, open_split
from bionemo.data.shards.source import open_shards
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES, ROOT

ONE, TWO = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "GSHMASMTGGQQMGRGSEFELRRQACGRTRVT"
V1 = f"record_id,record_name,sequence_length,sequence\n0,UniRef50_A,33,{ONE}\n1,UniRef50_B,32,{TWO}\n"
HEADERLESS = f"0,UniRef50_A,33,{ONE}\n1,UniRef50_B,32,{TWO}\n"
KEYS = "model.data.train.data_impl_kwargs"


def write(directory: Path, *contents: str) -> list[Path]:
    paths = [directory / f"x{number:03d}.csv" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return paths


def check(paths: list[Path], column: int, expected: SequenceKind = PROTEINS, header_lines: int = 1) -> None:
    check_columns(paths, CsvColumns(f"{KEYS}.csv_mmap", {"sequence": column}, header_lines=header_lines), expected)


@pytest.mark.parametrize(
    ("content", "column", "expected", "header_lines"),
    [
        (V1, 3, PROTEINS, 1),
        (V1.replace("\n", "\r\n"), 3, PROTEINS, 1),
        ("\ufeff" + V1, 3, PROTEINS, 1),
        (f"id,sequence,target\na,{ONE},0.5\n", 1, PROTEINS, 1),
        (f"id,sequence,3state,resolved\na,{ONE},{'H' * 33},{'1' * 33}\n", 1, PROTEINS, 1),
        (f"id,Mutated Sequence\na,{ONE}\n", 1, PROTEINS, 1),
        (f"id,proteinSeq\na,{ONE}\n", 1, PROTEINS, 1),
        (f"id,binder\na,{ONE}\nb,MKVLAA\n", 1, PROTEINS, 1),
        (f"a,b\nUniRef90_Q8WZ42,{ONE}\n", 1, PROTEINS, 1),  # unknown names: the records decide
        (f'id,text\n"a, ""b""\nc",{ONE}\n', 1, PROTEINS, 1),
        ("PEPTIDE\nAVLKRRR\nMKVLAAA\n", 0, PROTEINS, 1),
        (f"id,seq\na,{'M' * 100_000}\n", 1, PROTEINS, 1),
        (f"{ONE}\n{TWO}\n", 0, PROTEINS, 0),
        ("record_id,record_name,sequence_length,sequence\n0,a,0,\n", 3, PROTEINS, 1),  # empty cells are counted later
        ("zinc_id,smiles\nZINC1,CC(=O)Nc1ccccc1\nZINC2,C[N+](C)(C)C\n", 1, SMILES, 1),
        ("name,mol\nethanol,CCO\nnot one,c1cccc1\n", 1, SMILES, 1),
        ("zinc_id,smiles\nZINC1,c1cccc\n", 1, SMILES, 1),
    ],
)
def test_columns_that_hold_sequences_pass(
    content: str, column: int, expected: SequenceKind, header_lines: int, tmp_path: Path
) -> None:
    check(write(tmp_path, content), column, expected, header_lines)


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (
            f"id,sequence,length,organism\n1,{ONE},33,ECOLI\n",
            3,
            r"data_col=3 is the column 'organism', but the header has 0 'id', 1 'sequence', 2 'length', 3 'organism': "
            rf"set {KEYS}\.csv_mmap\.data_col=1$",
        ),
        (
            "a,b,c,d\n1,2,3,25\n4,5,6,30\n",
            3,
            r"data_col=3 holds '25' instead of protein sequences; .* 2 'c'",
        ),
        ("a,b,c,sequence\n1,2,3,25\n", 3, "holds '25' instead of protein sequences"),
        ("a,b\n1,UniRef50_Q8WZ42\n", 1, "holds 'UniRef50_Q8WZ42' instead of protein sequences"),
        (
            f"id,sequence\n1,{ONE}\n",
            3,
            rf"data_col=3, but the header has 0 'id', 1 'sequence': set {KEYS}\S+data_col=1$",
        ),
        (f"a\tb\tc\tsequence\n1\t2\t3\t{ONE}\n", 3, rf"correct .* or set {KEYS}\.csv_mmap\.data_sep$"),
        ("zinc_id,smiles\n1,CC(=O)Nc1ccccc1\n", 1, "data_col=1 holds .* instead of protein sequences; .* 1 'smiles'"),
    ],
)
def test_columns_that_hold_no_sequences_are_an_error(content: str, column: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"x000\.csv: .*{message}") as error:
        check(write(tmp_path, content), column)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [HEADERLESS, HEADERLESS.lower(), "0,a,4,AVLK\n1,b,5,MKVLA\n"])
def test_a_record_configured_as_header_is_an_error(content: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"x000\.csv:1: .*looks like a record .*: set {KEYS}\.csv_mmap\.header_lines=0"
    ):
        check(write(tmp_path, content), 3)
    with pytest.raises(UserError, match=r"x000\.csv:2: .*header_lines=2 skips a line .*set \S+header_lines=1"):
        check(write(tmp_path, V1), 3, header_lines=2)


def test_empty_lines_are_header_lines(tmp_path: Path) -> None:
    check(write(tmp_path, f"\n{V1}"), 3, header_lines=2)
    with pytest.raises(UserError, match=r"x000\.csv: .*but the header has"):
        check(write(tmp_path, f"\n{V1}"), 3)


@pytest.mark.parametrize("content", [V1, f"a,b,c,aa\n{HEADERLESS}"])
def test_a_header_configured_as_record_is_an_error(content: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x000\.csv:1: this line is a header \(0 .*set \S+\.header_lines=1$"):
        check(write(tmp_path, content), 3, header_lines=0)


def test_every_file_of_a_split_is_checked(tmp_path: Path) -> None:
    check(write(tmp_path, V1, V1.upper().replace("UNIREF50", "UniRef50")), 3)
    with pytest.raises(UserError, match=r"x001\.csv:1: .*looks like a record"):
        check(write(tmp_path, V1, HEADERLESS), 3)
    with pytest.raises(UserError, match=r"x001\.csv: \S+data_col=3, but the header .*data_col=1"):
        check(write(tmp_path, V1, f"id,sequence\n0,{ONE}\n"), 3)


def test_fields_are_found_by_their_names(tmp_path: Path) -> None:
    configured = CsvColumns(f"{KEYS}.csv_fields_mmap", {"products": 3, "reactants": 2})
    check_columns(write(tmp_path, "reaction_type,set,reactants,products\n1,train,CCO.C,CCO\n"), configured, SMILES)
    check_columns(write(tmp_path, "type,set,from,to\n1,train,CCO.C,CCO\n"), configured, SMILES)
    with pytest.raises(
        UserError, match=rf"'reactants', but .*: set {KEYS}\.csv_fields_mmap\.data_fields\.products=2$"
    ):
        check_columns(write(tmp_path, "reaction_type,set,products,reactants\n1,train,CCO.C,CCO\n"), configured, SMILES)


def open_proteins(directory: Path, content: str, *overrides: str) -> Split:
    for split in ("train", "val"):
        (directory / split).mkdir(exist_ok=True)
        (directory / split / "x000.csv").write_text(content)
    overrides = (f"model.data.dataset_path={directory}", "model.data.dataset.train=x000", *overrides)
    cfg = load("pretrain_small", overrides, EXAMPLES / "esm1nv" / "conf")
    return open_split(cfg.model.data, "train", 62, load_tokenizer("esm1nv"))


def test_a_reader_of_several_columns_needs_their_names(tmp_path: Path) -> None:
    cfg = load("pretrain_small", ["model.data.data_impl=csv_fields_mmap"], EXAMPLES / "esm1nv" / "conf")
    cfg.model.data.train.data_impl_kwargs.csv_fields_mmap.data_fields = {}
    with pytest.raises(UserError, match=r"csv_fields_mmap\.data_fields is empty: name its columns"):
        open_shards(cfg.model.data.train, write(tmp_path, V1), keys="model.data.train", expected=PROTEINS)


def test_opening_a_split_checks_the_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"'organism', but .*set {KEYS}\.csv_mmap\.data_col=1"):
        open_proteins(tmp_path, f"id,sequence,length,organism\n1,{ONE},33,ECOLI\n")
    with pytest.raises(UserError, match=rf"set {KEYS}\.csv_mmap\.header_lines=0"):
        open_proteins(tmp_path, HEADERLESS)
    opened = open_proteins(tmp_path, HEADERLESS, "model.data.data_impl_kwargs.csv_mmap.header_lines=0")
    assert [opened.source.text(record) for record in opened.records] == [ONE, TWO]
    assert not list(tmp_path.glob("train/*.csv.idx-*.tmp"))


def test_empty_sequences_are_dropped_and_counted(tmp_path: Path) -> None:
    opened = open_proteins(tmp_path, V1 + "2,UniRef50_C,0,\n")
    assert opened.records.tolist() == [0, 1]
    assert opened.notes == ("train data: 1 of 3 sequences are empty and are dropped",)
    empty = V1.splitlines()[0] + "\n0,a,0,\n1,b,0,\n"
    with pytest.raises(UserError, match="train data: all 2 sequences are empty: check the files and their columns"):
        open_proteins(tmp_path, empty)
    with pytest.raises(UserError, match="train data: all 2 sequences are empty"):
        open_proteins(tmp_path, empty.replace("0,\n", "2,  \n"))


def test_opening_molecules_checks_the_column(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    overrides = [f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000"]
    cfg = load("pretrain_xsmall_span_aug", overrides, ROOT / "examples" / "molecule" / "megamolbart" / "conf")
    for content, message in {
        "smiles,zinc_id\nCCO,ZINC1\n": rf"'zinc_id', but .*set {KEYS}\.csv_mmap\.data_col=0",
        "1,CCO\n2,CCN\n": rf"set {KEYS}\.csv_mmap\.header_lines=0",
        "zinc_id,smiles\n1,\n2,\n": "train data: all 2 SMILES are empty",
    }.items():
        write(tmp_path / "train", content)
        with pytest.raises(UserError, match=message):
            MoleculeDataset.open(cfg.model, load_tokenizer("megamolbart"), "train")
    write(tmp_path / "train", "zinc_id,smiles\n1,CCO\n2,\n3,CCN\n")
    samples = MoleculeDataset.open(cfg.model, load_tokenizer("megamolbart"), "train")
    assert samples.records.tolist() == [0, 2]
    assert "train data: 1 of 3 SMILES are empty and are dropped" in samples.notes
