# SPDX-License-Identifier: Apache-2.0
"""SMILES files to shards: no molecule is lost or repeated, whatever the number of processes."""

import csv
import gzip
import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
from rdkit import Chem

from bionemo.common.errors import UserError
from bionemo.preparation import molecules, zinc
from bionemo.preparation.manifest import Manifest, verify
from bionemo.preparation.zinc import prepare, shard_sizes
from tests.conftest import ROOT
from tests.support.preparation_zinc import job

OCTANES = [f"C{'C' * length}{end}" for length in range(20) for end in ("O", "N", "Cl", "C(=O)O", "c1ccccc1")]


def tranche(path: Path, molecules: list[tuple[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("smiles\tzinc_id\n" + "".join(f"{smiles}\t{name}\n" for smiles, name in molecules))
    return path


def shards(output: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the rows `id, SMILES` of each shard, read with the csv module."""
    found = {}
    for path in sorted(output.glob("*/x*.csv")):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["zinc_id", "smiles"]
        found[f"{path.parent.name}/{path.name}"] = [(name, smiles) for name, smiles in rows]
    return found


def all_rows(output: Path) -> list[tuple[str, str]]:
    return [row for rows in shards(output).values() for row in rows]


def sums(output: Path) -> dict[str, str]:
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.glob("*/x*.csv"))
    }


@pytest.fixture
def tranches(tmp_path: Path) -> Path:
    """A hundred molecules in two files, as SMILES that start with the last atom and are therefore not canonical."""
    turned = [Chem.MolToSmiles(mol, rootedAtAtom=mol.GetNumAtoms() - 1)
              for mol in map(Chem.MolFromSmiles, OCTANES)]  # fmt: skip
    rows = [(smiles, f"ZINC{number}") for number, smiles in enumerate(turned)]
    tranche(tmp_path / "in" / "AA" / "AAAA.txt", rows[:60])
    tranche(tmp_path / "in" / "AB" / "AAAA.txt", rows[60:])
    return tmp_path / "in"


def test_every_molecule_is_written_once_as_canonical_smiles(tranches: Path, tmp_path: Path) -> None:
    prepare(job(tranches, tmp_path / "out"))
    expected = [(f"ZINC{number}", Chem.CanonSmiles(smiles)) for number, smiles in enumerate(OCTANES)]
    rows = all_rows(tmp_path / "out")
    assert Counter(rows) == Counter(expected) and len(set(expected)) == 100
    assert rows != sorted(rows, key=expected.index)
    # 100 of a group of 1060: val 100 * 10 / 1060 -> 0, so 1; test 100 * 50 / 1060 = 4.7
    assert {name: len(rows) for name, rows in shards(tmp_path / "out").items()} == {
        "test/x000.csv": 4, "train/x000.csv": 95, "val/x000.csv": 1
    }  # fmt: skip
    assert verify(tmp_path / "out") == []


def test_workers_buckets_and_blocks_do_not_change_the_result(tranches: Path, tmp_path: Path) -> None:
    sizes = {"train_size": 30, "val_size": 2, "test_size": 3}
    prepare(job(tranches, tmp_path / "one", **sizes))
    with (
        patch.object(zinc, "_BUCKET_BYTES", 500),
        patch.object(zinc, "_BUFFER_BYTES", 300),
        patch.object(molecules, "_BLOCK_BYTES", 70),
    ):
        prepare(job(tranches, tmp_path / "two", num_preprocess_workers=2, **sizes))
    assert sums(tmp_path / "one") == sums(tmp_path / "two")
    prepare(job(tranches, tmp_path / "other", seed=1, **sizes))
    assert sums(tmp_path / "other") != sums(tmp_path / "one")
    assert Counter(all_rows(tmp_path / "other")) == Counter(all_rows(tmp_path / "one"))


def test_full_groups_have_the_requested_sizes(tranches: Path, tmp_path: Path) -> None:
    with patch.object(zinc, "_BUCKET_BYTES", 700):
        prepare(job(tranches, tmp_path / "out", train_size=30, val_size=2, test_size=3))
    # 35 + 35 + 30: of the last, val 30 * 2 / 35 = 1.7, test 30 * 3 / 35 = 2.6
    assert {name: len(rows) for name, rows in shards(tmp_path / "out").items()} == {
        **{"train/x000.csv": 30, "val/x000.csv": 2, "test/x000.csv": 3},
        **{"train/x001.csv": 30, "val/x001.csv": 2, "test/x001.csv": 3},
        **{"train/x002.csv": 27, "val/x002.csv": 1, "test/x002.csv": 2},
    }
    assert len(set(all_rows(tmp_path / "out"))) == 100


def test_sizes_of_shards() -> None:
    v1 = (10_050_000, 100, 50_000)
    assert shard_sizes(2 * sum(v1), *v1) == [{"train": 10_050_000, "val": 100, "test": 50_000}] * 2
    assert shard_sizes(sum(v1) + 2, *v1) == [{"train": 10_050_002, "val": 100, "test": 50_000}]
    assert shard_sizes(3, *v1) == [{"train": 1, "val": 1, "test": 1}]
    assert shard_sizes(2, 10, 0, 1) == [{"train": 1, "val": 0, "test": 1}]
    assert shard_sizes(3, 1, 90, 9) == [{"train": 1, "val": 1, "test": 1}]
    for total in range(3, 300):
        for sizes in ((7, 2, 1), (1, 90, 9), (50, 1, 1), (5, 0, 3)):
            found = shard_sizes(total, *sizes)
            assert sum(sum(shard.values()) for shard in found) == total
            assert all(shard["train"] > 0 and (shard["val"] > 0) == (sizes[1] > 0) for shard in found)
    with pytest.raises(UserError, match="2 molecules are left, too few"):
        shard_sizes(2, *v1)


def test_duplicates_long_and_unreadable_molecules_are_dropped_and_counted(tmp_path: Path) -> None:
    source = tranche(
        tmp_path / "in.txt",
        [("OCC", "first"), ("CCO", "b"), ("C(C)O", "a"), ("CCCCCCCC", "long"), ("C1CC", "open"), ("", "none"),
         ("C(CC)(CCCC)", "fits"), ("N", "n"), ("c1ccccc1C", "t"), ("Cc1ccccc1", "u")],
    )  # fmt: skip
    settings = {"max_smiles_length": 7, "on_invalid": "skip"}
    prepare(job(source, tmp_path / "skip", **settings))
    assert sorted(all_rows(tmp_path / "skip")) == [("first", "CCO"), ("fits", "CCCCCCC"), ("n", "N")]
    manifest = Manifest.read(tmp_path / "skip")
    assert manifest is not None
    tally = manifest.tallies[str(source)]
    assert (tally.read, tally.written) == (10, 3)
    assert tally.dropped == {"duplicate": 2, "invalid SMILES": 2, "longer than 7": 3}
    prepare(job(source, tmp_path / "keep", on_duplicate="keep", **settings))
    assert sorted(name for name, _ in all_rows(tmp_path / "keep")) == ["a", "b", "first", "fits", "n"]
    with pytest.raises(UserError, match=r"^first and b are the same molecule, CCO: .*on_duplicate=skip"):
        prepare(job(source, tmp_path / "error", on_duplicate="error", **settings))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unreadable_molecule_is_named_by_file_and_line(tranches: Path, tmp_path: Path, workers: int) -> None:
    path = tranches / "AB" / "AAAA.txt"
    path.write_text(path.read_text() + "\nC1CC(=O\tZINCbad\nC1\tZINCworse\n")
    with patch.object(molecules, "_BLOCK_BYTES", 100), pytest.raises(UserError) as error:
        prepare(job(tranches, tmp_path / "out", num_preprocess_workers=workers))
    assert str(error.value).startswith(f"{path}:43: RDKit cannot read the SMILES 'C1CC(=O': ")
    assert not list((tmp_path / "out").glob("*/x*.csv"))


ETHANOL_AND_MORE = [("e 1", "CCO"), ("m", "C"), ("p", "CCC")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", "smiles\tzinc_id\nOCC\te 1\nC\tm\nCCC\tp\n"),
        ("x.csv", '\ufeffzinc_id,SMILES\r\n"e 1",OCC\r\nm,C\r\np,CCC\r\n'),
        ("x.tsv", "price\tID\tSmiles\n1\te 1\tOCC\n2\tm\tC\n3\tp\tCCC"),
        ("x.smi", "OCC\te 1\nC\tm\n\nCCC\tp\n"),
        ("x.smi.gz", "OCC,e 1\nC,m\nCCC,p"),
    ],
)
def test_columns_are_found_by_header_or_order(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    for piece in (3, 1 << 20):
        with patch.object(molecules, "_BLOCK_BYTES", piece):
            prepare(job(path, tmp_path / f"out{piece}"))
        assert sorted(all_rows(tmp_path / f"out{piece}")) == ETHANOL_AND_MORE


@pytest.mark.parametrize("content", ["price,Smiles\n1,OCC\n2,C\n3,CCC\n", "\nOCC\nC\nCCC\n"])
def test_molecules_without_ids_are_numbered(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    prepare(job(tmp_path / "x.csv", tmp_path / "out"))
    assert sorted(all_rows(tmp_path / "out")) == [("0-2", "CCO"), ("0-3", "C"), ("0-4", "CCC")]


def test_ids_with_commas_and_quotes_are_preserved(tmp_path: Path) -> None:
    source = tranche(tmp_path / "x.txt", [("CCO", 'ethanol, "pure"'), ("C", "methane"), ("N", "ammonia")])
    prepare(job(source, tmp_path / "out"))
    assert ('ethanol, "pure"', "CCO") in all_rows(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"smiles\tzinc_id\nC\ta\nCC\n", r"x\.txt:3: a molecule without an id"),
        (b"id smiles\na C\nb c CC\n", r"x\.txt:3: 3 columns instead of 2: separate the columns with tabs"),
        (b"x\tC\ny\n", r"x\.txt:2: a line without a SMILES \(1 of 2 columns\)"),
        (b"smiles\tzinc_id\nC\ta\nCC\t\xff\n", r"x\.txt:3: text that is not UTF-8"),
        (b"smiles\tzinc_id\nC\ta\nCC\tb\n", "2 molecules are left, too few"),
        (b"http://a.org/x.txt\nnothing\n", r"x\.txt:2: 'nothing' is not a URL"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(job(tmp_path / "x.txt", tmp_path / "out"))
    assert "\n" not in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty contains no file named"):
        prepare(job(tmp_path / "empty", tmp_path / "out"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Do not log."""


@pytest.fixture
def site(tranches: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tranches)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_list_of_urls_and_a_directory_give_equal_results(tranches: Path, tmp_path: Path, site: str) -> None:
    links, out = tmp_path / "links.txt", tmp_path / "web"
    names = ["AA/AAAA.txt", "gone.txt", "AB/AAAA.txt", "AA/AAAA.txt"]
    links.write_text("\n".join(f"{site}/{name}" for name in names))
    with pytest.raises(UserError, match=rf"^{site}/gone.txt was refused with 404.* 1 of 3 files") as error:
        prepare(job(links, out))
    assert "\n" not in str(error.value)
    assert len(list((out / "raw").rglob("AAAA.txt"))) == 2  # the files after the missing one were downloaded
    for path in tranches.rglob("AAAA.txt"):
        path.rename(path.with_name("BBBB.txt"))  # existing files are not requested again
    (tranches / "gone.txt").write_text("smiles\tzinc_id\n")
    prepare(job(links, out))
    prepare(job(tranches, tmp_path / "local"))
    assert sums(out) == sums(tmp_path / "local") and len(sums(out)) == 3
    manifest = Manifest.read(out)
    assert manifest is not None and [each.source for each in manifest.inputs] == [f"{site}/{n}" for n in names[:3]]
    assert verify(out) == []


def test_a_column_can_be_given(tmp_path: Path) -> None:
    source = tmp_path / "x.tsv"
    source.write_text("key\traw\tcurated\n" + "".join(f"k{n}\t[Na]{text}\t{text}\n" for n, text in enumerate(OCTANES)))
    for column in ("curated", "2", 2):
        prepare(job(source, tmp_path / "out", sequence_column=column, id_column="key", force=True))
        assert Counter(all_rows(tmp_path / "out")) == Counter(
            (f"k{number}", Chem.CanonSmiles(text)) for number, text in enumerate(OCTANES)
        )


@pytest.mark.parametrize("name", ["train.smiles", "a.ism", "b.SMI"])
def test_a_directory_of_smiles_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text("".join(f"{text} name, {n}\n" for n, text in enumerate(OCTANES)))
    prepare(job(tmp_path / "in", tmp_path / "out"))
    assert sorted(name for name, _ in all_rows(tmp_path / "out")) == sorted(f"name, {n}" for n in range(100))


def test_molecules_that_are_left_out_are_named_if_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "x.smi").write_text("C(C)(C)(C)(C)C a\nF(C)C b\n")
    with pytest.raises(UserError, match=r"0 molecules are left, too few to divide \(2 invalid SMILES\)"):
        prepare(job(tmp_path / "x.smi", tmp_path / "out", on_invalid="skip"))
    (tmp_path / "x.smi").write_text("aspirin\nibuprofen\n")
    with pytest.raises(UserError, match=r"no SMILES in column 1 of .* \(first line 'aspirin'\).*sequence_column"):
        prepare(job(tmp_path / "x.smi", tmp_path / "out", on_invalid="skip"))


def test_splits_do_not_depend_on_the_canonical_form(tranches: Path, tmp_path: Path) -> None:
    """Another release of RDKit may write other canonical SMILES; here they begin with another atom."""
    sizes = {"train_size": 30, "val_size": 10, "test_size": 10}
    rows = [
        f"{Chem.MolToSmiles(Chem.MolFromSmiles(text), rootedAtAtom=0)}\tagain{n}\n" for n, text in enumerate(OCTANES)
    ]
    (tranches / "more.txt").write_text("smiles\tzinc_id\n" + "".join(rows))
    prepare(job(tranches, tmp_path / "one", **sizes))

    def other(text: str) -> str:
        molecule = Chem.MolFromSmiles(Chem.CanonSmiles(text))
        return Chem.MolToSmiles(molecule, rootedAtAtom=molecule.GetNumAtoms() - 1)

    with patch.object(zinc, "canonical_smiles", other):
        prepare(job(tranches, tmp_path / "two", **sizes))
    one, two = shards(tmp_path / "one"), shards(tmp_path / "two")
    assert {name: [row[0] for row in rows] for name, rows in one.items()} == {
        name: [row[0] for row in rows] for name, rows in two.items()
    }
    assert sum(map(len, one.values())) == 100 and one != two


@pytest.mark.skipif(not (ROOT.parent / "shared" / "data").is_dir(), reason="needs the shared data")
def test_shared_zinc_sample(tmp_path: Path) -> None:
    source = ROOT.parent / "shared" / "data" / "molecules" / "zinc_sample"
    prepare(job(source, tmp_path / "out", num_preprocess_workers=2))
    rows = [row for path in sorted(source.glob("*.csv")) for row in csv.DictReader(path.open())]
    assert Counter(smiles for _, smiles in all_rows(tmp_path / "out")) == Counter(
        {Chem.CanonSmiles(row["smiles"]): 1 for row in rows}
    )
