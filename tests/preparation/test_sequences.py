# SPDX-License-Identifier: Apache-2.0
"""Conversion of sequences to shards, compared with a reference in Python and with the order of BioNeMo v1."""

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.preparation import chunks, sequences
from bionemo.preparation.manifest import Manifest, verify
from tests.conftest import ROOT
from tests.support.preparation import generated, left, parse, prepare, reference, rows, shards, small, write
from tests.support.sequence_files import open_sequences


def test_order_equals_v1(tmp_path: Path) -> None:
    source = write(tmp_path, "".join(f">n{i}\n{'M' * (i % 7 + 1)}\n" for i in range(100)))
    prepare(source, tmp_path / "out", val_size=10, test_size=5, num_csv_files=4)
    found = {split: [int(row[0]) - 1 for row in part] for split, part in rows(tmp_path / "out").items()}
    assert found["val"] == [82, 36, 20, 5, 93, 16, 94, 52, 72, 90]
    assert found["test"] == [83, 13, 81, 37, 11]
    assert sorted(found["train"]) == sorted({*range(100)} - {*found["val"], *found["test"]})
    assert found["train"] != sorted(found["train"])
    sizes = {name: content.count(b"\n") - 1 for name, content in shards(tmp_path / "out").items()}
    assert sizes == {
        **{"val/x000.csv": 3, "val/x001.csv": 3, "val/x002.csv": 2, "val/x003.csv": 2},
        **{"test/x000.csv": 2, "test/x001.csv": 1, "test/x002.csv": 1, "test/x003.csv": 1},
        **{"train/x000.csv": 22, "train/x001.csv": 21, "train/x002.csv": 21, "train/x003.csv": 21},
    }
    assert shards(tmp_path / "out")["val/x000.csv"].startswith(
        b"record_id,record_name,sequence_length,sequence\n83,n82,6,MMMMMM\n37,n36,2,MM\n"
    )


ODD = {
    "wrapped and not": ">a\nMK\nV\n>b\nMKV\n>c\nM\nK\nV\nL\n>d\nMM\n>e\nAA",
    "blank lines": "\n\n>a\n\nMK\n\n\nV\n>b\n\n\nMKV\n\n>c\nM\n\n",
    "no line end": ">a\nM\n>b\nK\n>c\nV",
    "one letter": ">a\nM\n>b\nK\n>c\nV\n>d\nL\n",
    "byte order mark": "\ufeff>a\nM\n>b\nK\n>c\nV\n",
    "words and tabs": ">a\tb c\nM\n>b c d\nK\n>c\t\nV\n>d \nL\n>e\t\t e\nL\n",
    "marks in headers": ">a>b >c\nM\n>b=> x>\nK\n>>c\nV\n>d >\nL\n",
    "commas and quotes": '>a,b\nM\n>"b"\nK\n>",\n M\n>c"d e"\nV\n>,\nL\n>""\nA\n'.replace(" M", "M"),
    "UTF-8": ">é 中\nM\n>中文\nK\n>c é\nV\n",
    "CR LF": "\r\n>a x\r\nMK\r\nV\r\n\r\n>b\t\r\nMKV\r\n>c\r\nM\r\n>d\r\nL",
    "either line end": ">a\r\nMK\nV\r\n>b\nMKV\n>c\r\nM\n",
    "lower case": ">a\nmk\n>b\nMkV\n>c\nxz\n>d\nU\n",
    "lengths of all digits": "".join(f">n{n}\n{'M' * n}\n" for n in (1, 9, 10, 99, 100, 999, 1000)),
}

AWKWARD = ">0012\nNA\n>1e5\nNAN\n>NA\nTRUE\n>NULL\nMK\n>2024-01-01\nMKV\n>T\nINF\n"


@pytest.mark.parametrize("sizes", [{}, {"chunk": 7, "block": 5, "bucket": 20, "partition": 2}])
@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_unusual_files_against_the_reference(tmp_path: Path, content: str, sizes: dict[str, int]) -> None:
    with small(**sizes):
        prepare(write(tmp_path, content), tmp_path / "out", num_csv_files=3, seed=5)
    assert shards(tmp_path / "out") == reference(parse(content.encode()), 1, 1, 5, 3)


def test_several_files_are_numbered_consecutively(tmp_path: Path) -> None:
    contents = {"a.fasta": ODD["CR LF"], "b.gz": generated(40), "c.fasta": "\ufeff" + ODD["UTF-8"], "d": ">n\nM"}
    sources = [write(tmp_path, text, name) for name, text in contents.items()]
    with small(chunk=300, block=100, bucket=500):
        manifest = prepare(sources, tmp_path / "out", on_duplicate="keep", val_size=7, test_size=3, num_csv_files=4)
    records = [record for text in contents.values() for record in parse(text.encode())]
    assert shards(tmp_path / "out") == reference(records, 7, 3, 0, 4)
    assert [Path(file.source).name for file in manifest.inputs] == list(contents)
    [tally] = manifest.tallies.values()
    assert tally.read == tally.written == len(records) and not tally.dropped
    assert tally.letters_read == tally.letters_written == sum(len(letters) for _, letters in records)
    assert tally.changed == {"with CR LF line ends": 4}


def test_sequences_over_many_blocks(tmp_path: Path) -> None:
    letters = "".join(np.random.default_rng(3).choice(list("ACDEFGHIKLMNPQRSTVWY"), 300_000))
    lines = "\n".join(letters[i : i + 60] for i in range(0, len(letters), 60))
    content = f">short\nM\n>wrapped\n{lines}\n>s\nM\n>line\n{letters}\n>t\nK\n>last\n{letters[::-1]}"
    with small(chunk=1000, block=4096, bucket=1 << 16):
        prepare(write(tmp_path, content), tmp_path / "out", num_csv_files=1)
    assert shards(tmp_path / "out") == reference(parse(content.encode()), 1, 1, 0, 1)


@pytest.mark.parametrize("marker", [b"", b">"])
def test_a_chunk_ends_where_the_next_record_begins(tmp_path: Path, marker: bytes) -> None:
    data = b">a\nM\n\n>>\n\n\nK>\n>b\nVV\n>c>\n"
    path = write(tmp_path, data)
    for size in range(1, len(data) + 9):
        with small(chunk=size):
            found = chunks.find_bounds(path, 0, marker)
        expected = [0]
        while expected[-1] < len(data):
            expected.append(data.find(b"\n" + marker, expected[-1] + size - 1) + 1 or len(data))
        assert found == expected


@st.composite
def fasta_texts(draw: st.DrawFn) -> str:
    """Generate records in any form that FASTA allows."""
    end = draw(st.sampled_from(["\n", "\r\n"]))
    text = draw(st.sampled_from(["", "\n", "\ufeff"]))
    unique = draw(st.uuids()).hex[:8]
    for i in range(draw(st.integers(1, 9))):
        word = draw(st.text(st.sampled_from('ab,">é中='), max_size=5))
        rest = draw(st.sampled_from(["", " ", "\t", " x y", "\tz > q", ' a,b"c"']))
        text += f">{word}|{unique}{i}{rest}{end}"
        for line in draw(st.lists(st.text(st.sampled_from("ACdefXZ"), max_size=12), min_size=1, max_size=4)):
            text += line + end
        text += draw(st.sampled_from("ACm")) + draw(st.sampled_from([end, end * 2]))
    return text.rstrip("\r\n") if draw(st.booleans()) else text


@settings(max_examples=50)
@given(st.lists(fasta_texts(), min_size=1, max_size=3), st.data())
def test_any_files_and_chunks_against_the_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    records = [record for text in texts for record in parse(text.encode())]
    val = data.draw(st.integers(0, len(records) - 1))
    test = data.draw(st.integers(0, len(records) - 1 - val))
    seed, files = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5))
    sizes = {name: data.draw(st.integers(1, 90), name) for name in ("chunk", "block", "bucket")}
    sizes["partition"] = data.draw(st.integers(1, 9))
    folder = tmp_path_factory.mktemp("fasta")
    sources = [write(folder, text, data.draw(st.sampled_from([f"{i}.fa", f"{i}.gz"]))) for i, text in enumerate(texts)]
    with small(**sizes):
        keywords = {"val_size": val, "test_size": test, "seed": seed, "num_csv_files": files, "format": "fasta"}
        prepare(sources, folder / "out", on_duplicate="keep" if len(texts) > 1 else "error", **keywords)
    assert shards(folder / "out") == reference(records, val, test, seed, files)


def test_dropped_records_are_not_in_the_shuffled_list(tmp_path: Path) -> None:
    records = parse(generated(60).encode())
    bad = {0, 7, 8, 31, 59}
    text = "".join(f">{name}\n{letters}{'*' * (i in bad)}\n" for i, (name, letters) in enumerate(records))
    with small(chunk=200, block=90, bucket=300):
        prepare(write(tmp_path, text), tmp_path / "out", on_letters="skip", val_size=0.1, test_size=5)
    kept = [i for i in range(60) if i not in bad]
    numbers = [i + 1 for i in kept]
    assert shards(tmp_path / "out") == reference([records[i] for i in kept], round(5.5), 5, 0, 2, numbers)


def test_the_training_reader_finds_every_sequence(tmp_path: Path) -> None:
    content = generated(50) + ODD["commas and quotes"] + ODD["UTF-8"].replace(">c", ">c2")
    prepare(write(tmp_path, content), tmp_path / "out", val_size=0, test_size=0, num_csv_files=3)
    columns = {"name": 1, "sequence": 3}
    source = open_sequences("csv_fields_mmap", sorted((tmp_path / "out/train").iterdir()), data_fields=columns)
    found = [source.fields(i) for i in range(len(source))]
    assert sorted((row["name"], row["sequence"]) for row in found) == sorted(parse(content.encode()))


@pytest.mark.parametrize("name", ["uniref90_sample.fasta", "some_proteins.fasta", "P62593_variants.fasta"])
def test_real_files(tmp_path: Path, name: str) -> None:
    source = ROOT.parent / "shared/data/proteins" / name
    if not source.exists():
        pytest.skip("no shared data")
    with small(chunk=1 << 20, bucket=1 << 18):
        prepare(source, tmp_path / "out", val_size=0.05, test_size=0.1, on_letters="keep", num_csv_files=5)
    records = parse(source.read_bytes())
    found = [row for part in rows(tmp_path / "out").values() for row in part]
    assert Counter((row[1], row[3]) for row in found) == Counter((name, text.upper()) for name, text in records)
    assert all(records[int(number) - 1][0] == name and int(size) == len(text) for number, name, size, text in found)
    total = len(records)
    assert shards(tmp_path / "out") == reference(records, round(0.05 * total), round(0.1 * total), 0, 5)


@pytest.mark.parametrize("name", ["x.fasta", "x.fasta.gz"])
def test_workers_do_not_change_the_shards(tmp_path: Path, name: str) -> None:
    content = generated(3000)
    source = write(tmp_path, content, name)
    for workers in (1, 2) if name == "x.fasta" else (2,):
        prepare(source, tmp_path / str(workers), workers, val_size=0.1, test_size=0.2, num_csv_files=7)
        assert shards(tmp_path / str(workers)) == reference(parse(content.encode()), 300, 600, 0, 7)


@pytest.mark.parametrize(
    ("val", "test", "expected"),
    [
        (3, 4, (3, 4, 13)),
        (0, 0, (0, 0, 20)),
        (0.1, 0.25, (2, 5, 13)),
        (0.99, 0, None),
        (0.17, 0.01, (3, 1, 16)),  # 3.4 and 0.2
        (0.18, 5, (4, 5, 11)),  # 3.6
        (2.0, 1.0, (2, 1, 17)),  # counts, although written with a decimal point
        (19, 0, (19, 0, 1)),
        (20, 0, None),
        (10, 10, None),
        (0.5, 0.5, None),
        (-1, 3, None),
        (0, -0.5, None),
        (5000, 1_000_000, None),
    ],
)
def test_split_sizes_are_fractions_or_counts(
    tmp_path: Path, val: float, test: float, expected: tuple[int, int, int] | None
) -> None:
    source = write(tmp_path, generated(20))
    if expected is None:
        with pytest.raises(UserError, match=rf"val_size={val} and test_size={test} leave no training records of 20"):
            prepare(source, tmp_path / "out", val_size=val, test_size=test)
        assert not left(tmp_path / "out")
    else:
        prepare(source, tmp_path / "out", val_size=val, test_size=test)
        found = rows(tmp_path / "out")
        assert tuple(len(found[split]) for split in ("val", "test", "train")) == expected
        assert {path.parent.name for path in (tmp_path / "out").rglob("*.csv")} == {
            split for split, size in zip(("val", "test", "train"), expected, strict=True) if size
        }


TABLE = 'name,note,seq\na,x,MK\n"b,1","say ""hi""",mkv\n"c""d",,L\n,"",M\nNA,null,NA\n'
TABLE_RECORDS = [("a", "MK"), ("b,1", "mkv"), ('c"d', "L"), ("", "M"), ("NA", "NA")]


@pytest.mark.parametrize(
    ("content", "columns", "changes"),
    [
        (TABLE, ("name", "seq"), {}),
        (TABLE, (0, 2), {}),
        (TABLE, ("0", "2"), {}),
        ("\ufeff" + TABLE, (0, "seq"), {}),
        (TABLE.replace("\n", "\r\n"), ("name", 2), {}),
        (TABLE.rstrip(), ("name", "seq"), {}),
        (TABLE.replace("b,1", "b;1").replace(",", "\t").replace(";", ","), ("name", "seq"), {"separator": "\t"}),
        (TABLE.replace("b,1", "b;1").replace(",", "\t").replace(";", ","), ("name", "seq"), {"separator": "\\t"}),
        (TABLE.replace("b,1", "b;1").replace(",", "\t").replace(";", ","), ("name", "seq"), {}),
        (TABLE.replace("b,1", "b#1").replace(",", ";").replace("#", ","), ("name", "seq"), {"separator": ";"}),
        (TABLE.replace("b,1", "b#1").replace(",", ";").replace("#", ","), ("name", "seq"), {}),
        (">" + TABLE, (0, 2), {"format": "csv"}),
    ],
)
def test_columns_of_a_table(
    tmp_path: Path, content: str, columns: tuple[str | int, str | int], changes: dict[str, str]
) -> None:
    content = content.replace(',"",M', 'z,"",M').replace('\t""\tM', 'z\t""\tM').replace(';"";M', 'z;"";M')
    records = [(name or "z", letters) for name, letters in TABLE_RECORDS]
    for name in ("x.csv", "x.csv.gz"):
        out = tmp_path / f"out.{name}"
        prepare(write(tmp_path, content, name), out, id_column=columns[0], sequence_column=columns[1], **changes)
        assert shards(out) == reference(records, 1, 1, 0, 2)


def test_a_long_table_and_a_fasta_file_are_one_input(tmp_path: Path) -> None:
    records = parse(generated(5000, longest=30).encode())
    table = "id,sequence\n" + "".join(f"{name},{letters}\n" for name, letters in records)
    with patch("bionemo.preparation.records._CSV_BLOCK", 1 << 12):
        sources = [write(tmp_path, table, "a.csv"), write(tmp_path, ">z\nMK\n>y\nMV\n"), write(tmp_path, "id,sequence\nx,M", "c.csv")]  # fmt: skip  # noqa: E501
        prepare(sources, tmp_path / "out", val_size=100, test_size=200)
    assert shards(tmp_path / "out") == reference([*records, ("z", "MK"), ("y", "MV"), ("x", "M")], 100, 200, 0, 2)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (TABLE, {}, r"x.csv has no column 'id'; it has name, note, seq: set id_column"),
        (TABLE, {"id_column": 0}, "x.csv has no column 'sequence'; it has name"),
        (TABLE, {"id_column": 3}, "x.csv has no column 3; it has name"),
        (TABLE, {"id_column": -1}, "x.csv has no column -1; it has name"),
        (TABLE, {"id_column": 0, "sequence_column": "name"}, "id_column and sequence_column are both 'name'"),
        ("x,x\na,M\nb,K\n", {"id_column": 0, "sequence_column": 1}, "several columns 'x'"),
        ("id,sequence,z\na,M,1\nb,K\n", {}, "x.csv: .*Row #3: Expected 3 columns, got 2.*separator"),
        ("id,sequence\na,M\nb,K,1\n", {}, "x.csv: .*Row #3: Expected 2 columns, got 3"),
        ('id,sequence\n"a,M\nb,K\n', {}, "x.csv: .*CSV parse error"),
        ("id,sequence\na,M\nb,M1\n", {}, "x.csv:3: record 'b' has '1' in its sequence"),
        ('id,sequence\na,M\n"b\nc",M\n', {}, r"x.csv:3: record 'b\\nc' has a line end in its name"),
        ('id,sequence\na,M\nb,"M\nK"\n', {"on_letters": "keep"}, r"x.csv:3: record 'b' has '\\n' in its sequence"),
        ("id,sequence\n,M\nb,M\n", {}, "x.csv:2: record '' has no name"),
        ("id,sequence\na,\nb,M\n", {}, "x.csv:2: record 'a' has no sequence"),
        ("id,sequence\na,NA\nb,nan\n", {}, "x.csv:3: record 'b' has no sequence"),
        ("id,sequence\na,M\nb,M*K*\n", {"on_letters": "strip"}, "x.csv:3: record 'b' has a stop codon inside its seq"),
        ("id,sequence\n", {}, "leave no training records of 0"),
        (TABLE, {"separator": ";;"}, "separator is ';;': it must be one ASCII character"),
        (TABLE, {"separator": ""}, "separator is ''"),
        (TABLE, {"format": "fasta"}, "x.csv:1: text before the first '>'"),
    ],
)
def test_mistakes_with_tables(tmp_path: Path, content: str, changes: dict[str, Any], message: str) -> None:
    source = write(tmp_path, content, "x.csv")
    with pytest.raises(UserError, match=message) as error:
        prepare(source, tmp_path / "out", **({"val_size": 0, "test_size": 0} | changes))
    assert "\n" not in str(error.value)
    assert not left(tmp_path / "out")


def test_a_checksum_requires_a_single_file(tmp_path: Path) -> None:
    sources = [write(tmp_path, generated(9)), write(tmp_path, ODD["lower case"], "y.fasta")]
    with pytest.raises(UserError, match="checksum applies to a single file, but source has 2 files"):
        prepare(sources, tmp_path / "out", checksum="md5:" + "0" * 32)


def test_an_unchanged_data_set_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    """Earlier versions also recorded a checksum of samples of each input file."""
    prepare(write(tmp_path, generated(9)), tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    for entry in content["inputs"]:
        entry["sample"] = "0" * 32
    path.write_text(json.dumps(content))
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.csv")}
    prepare(tmp_path / "x.fasta", tmp_path / "out")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.csv")} == times


def test_secrets_of_a_url_are_not_written(tmp_path: Path) -> None:
    source = write(tmp_path, generated(9))
    with patch.object(sequences, "fetch", lambda *_: source):
        prepare("https://me:secret@example.org/a/proteins.fasta?key=secret#secret", tmp_path / "out")
    manifest = Manifest.read(tmp_path / "out")
    assert manifest is not None and list(manifest.tallies) == ["proteins.fasta"]
    assert manifest.inputs[0].source == "https://example.org/a/proteins.fasta"
    assert "secret" not in (tmp_path / "out/manifest.json").read_text()


@pytest.mark.parametrize("name", ["rows", "shards", "0.txt", "x" * 255])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    prepare(write(tmp_path, generated(9), name), tmp_path / "out")
    assert shards(tmp_path / "out") == reference(parse(generated(9).encode()), 1, 1, 0, 2)


@pytest.mark.parametrize("sizes", [{}, {"chunk": 7, "block": 5, "bucket": 20, "partition": 2}])
@pytest.mark.parametrize("content", [ODD["commas and quotes"], ODD["UTF-8"], ODD["lengths of all digits"], AWKWARD])
def test_parquet_shards_have_the_rows_of_csv_shards(tmp_path: Path, content: str, sizes: dict[str, int]) -> None:
    source = write(tmp_path, content)
    with small(**sizes):
        prepare(source, tmp_path / "csv")
        manifest = prepare(source, tmp_path / "parquet", output_format="parquet")
    for name, text in shards(tmp_path / "csv").items():
        path = (tmp_path / "parquet" / name).with_suffix(".parquet")
        table = pq.read_table(path)
        header, *expected = csv.reader(io.StringIO(text.decode()))
        assert table.column_names == header
        assert [list(map(str, row.values())) for row in table.to_pylist()] == expected
        assert manifest.files[str(path.relative_to(tmp_path / "parquet"))].rows == len(expected) > 0
    assert manifest.versions["pyarrow"] == pa.__version__
    assert not list((tmp_path / "parquet").rglob("*.csv"))


def test_workers_do_not_change_parquet_shards(tmp_path: Path) -> None:
    source = write(tmp_path, "".join(f">n{i}\n{'ACD' * (i % 50 + 1)}\n" for i in range(900)))
    found = []
    for workers in (0, 2):
        output = tmp_path / str(workers)
        prepare(source, output, workers, output_format="parquet")
        found.append({path.relative_to(output): path.read_bytes() for path in output.rglob("*.parquet")})
    assert found[0] == found[1] and len(found[0]) == 4


def test_damaged_parquet_shards_are_found(tmp_path: Path) -> None:
    prepare(write(tmp_path, ODD["lower case"]), tmp_path / "out", output_format="parquet")
    path = tmp_path / "out" / "train" / "x000.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    assert verify(tmp_path / "out") == ["train/x000.parquet has changed since it was written: its checksum differs"]


def test_another_output_format_is_another_data_set(tmp_path: Path) -> None:
    source = write(tmp_path, ODD["lower case"])
    manifest = prepare(source, tmp_path / "out")
    assert "output_format" not in manifest.parameters  # as in earlier versions
    with pytest.raises(UserError, match=r"output_format"):
        prepare(source, tmp_path / "out", output_format="parquet")
    prepare(source, tmp_path / "out", output_format="parquet", force=True)
    assert {path.suffix for path in (tmp_path / "out" / "train").iterdir()} == {".parquet"}
