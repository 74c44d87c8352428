# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.data.shards.formats import Fasta
from tests.support.sequence_files import open_sequences


@st.composite
def fasta_files(draw):
    """Generate records with fixed or varying line widths, blank lines, white space, LF, CR LF or mixed line ends."""
    ends = st.sampled_from(draw(st.sampled_from([["\n"], ["\r\n"], ["\n", "\r\n"]])))
    width = draw(st.integers(1, 9))
    even, spaces = draw(st.booleans()), draw(st.booleans())
    records, text = [], draw(st.sampled_from(["", "\n", "\ufeff"]))
    for _ in range(draw(st.integers(1, 6))):
        header = draw(st.text(st.sampled_from("ab >=é中"), max_size=8))
        letters = draw(st.sampled_from("ACw")) + draw(st.text(st.sampled_from("ACDEFw*-"), max_size=30))
        text += ">" + header + draw(ends)
        at = 0
        while at < len(letters):
            step = width if even else draw(st.integers(1, 9))
            spaced = (
                draw(st.sampled_from([" ", "\t", " \v"])).join(letters[at : at + step])
                if spaces
                else letters[at : at + step]
            )
            text += spaced + draw(ends) * (1 if even else draw(st.integers(1, 2)))
            at += step
        records.append((header, letters))
    return (text.rstrip("\r\n") if draw(st.booleans()) else text), records


@settings(max_examples=100)
@given(fasta_files(), st.data())
def test_records_are_read(tmp_path_factory, file, data):
    text, records = file
    path = tmp_path_factory.mktemp("fasta") / "x.fasta"
    path.write_bytes(text.encode())
    source = open_sequences("fasta_fields_mmap", [path])
    records = [(header, letters.rstrip("*")) for header, letters in records]
    names = [next(iter(header.split()), "") for header, _ in records]
    assert [source.fields(i)["id"] for i in range(len(source))] == names
    assert [source.text(i) for i in range(len(source))] == [letters for _, letters in records]
    assert source.lengths.tolist() == [len(letters) for _, letters in records]

    selected = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=6))
    starts = [data.draw(st.integers(0, len(records[i][1]))) for i in selected]
    counts = [data.draw(st.integers(0, len(records[i][1]) - s)) for i, s in zip(selected, starts, strict=True)]
    positions = np.cumsum(counts) - counts
    out = np.zeros(sum(counts), np.uint8)
    source.gather(np.array(selected), np.array(starts), np.array(counts), out, positions)
    expected = "".join(records[i][1][s : s + c] for i, s, c in zip(selected, starts, counts, strict=True))
    assert out.tobytes().decode() == expected


def write(tmp_path, content, name="x.fasta"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_fields_of_a_uniref_header(tmp_path):
    head = "UniRef50_P1 Some protein > 9 kDa n=3 Tax=Bacillus subtilis TaxID=1423 RepID=P1=X"
    source = open_sequences("fasta_fields_mmap", [write(tmp_path, f">{head}\nMK\nV\n>b\nA\n>\nC\n")])
    assert source.fields(0) == {
        **{"n": "3", "Tax": "Bacillus subtilis", "TaxID": "1423", "RepID": "P1=X"},
        **{"id": "UniRef50_P1", "sequence": "MKV"},
    }
    assert source.fields(1) == {"id": "b", "sequence": "A"}
    assert source.fields(2) == {"id": "", "sequence": "C"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            "lcl|x_1 [gene=abcA] [protein=[acyl] ABC=1; permease] [protein_id=WP_1.1] [location=complement(1..3)]",
            {"gene": "abcA", "protein": "[acyl] ABC=1; permease", "protein_id": "WP_1.1",
             "location": "complement(1..3)"},
        ),
        ("XP_1 some protein [gene=] [Homo sapiens]", {"gene": ""}),
        ("x n=3 [gene=abcA] Tax=Homo sapiens", {"n": "3", "gene": "abcA", "Tax": "Homo sapiens"}),
        (
            "1_1 # 2 # 181 # 1 # ID=1_1;partial=10;start_type=Edge;rbs_motif=None; ",
            {"ID": "1_1", "partial": "10", "start_type": "Edge", "rbs_motif": "None"},
        ),
        (
            "sp|P1|A_HUMAN Protein a; b (EC=1) OS=Homo sapiens (Human; man) OX=9606 GN=A PE=1 SV=2",
            {"EC": "1)", "OS": "Homo sapiens (Human; man)", "OX": "9606", "GN": "A", "PE": "1", "SV": "2"},
        ),
    ],
)  # fmt: skip
def test_fields_of_headers(header, expected):
    """NCBI, Prodigal and UniProt."""
    assert Fasta().fields(f">{header}\nMK\n".encode()) == {**expected, "id": header.split()[0]}


def test_shards_with_different_line_ends_and_widths(tmp_path):
    contents = [
        ">a\nMKVMKV\n>b\nAA\n",
        ">c\r\nMKV\r\nLLA\r\nC\r\n",
        ">d\nMK\nVMKV\nA\n>e\nMK\nVM\n",
        ">f\nMK\nVM\nK\n",
    ]
    paths = [write(tmp_path, text, f"x{i}.fasta") for i, text in enumerate(contents)]
    source = open_sequences("fasta_fields_mmap", paths)
    letters = ["MKVMKV", "AA", "MKVLLAC", "MKVMKVA", "MKVM", "MKVMK"]
    assert [source.text(i) for i in range(6)] == letters
    out = np.zeros(6, np.uint8)
    for start in range(2):
        source.gather(np.arange(6), np.full(6, start), np.ones(6, int), out, np.arange(6)[::-1])
        assert out.tobytes().decode() == "".join(text[start] for text in letters)[::-1]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", None, "is empty"),
        ("\n\nMKV\n>a\nMKV\n", 3, "text before the first '>'"),
        ("\n \n", 2, "text before the first '>'"),
        ("\n\n", None, "contains no records"),
        (">P1;CRAB\nCRYSTALLIN\nMKV*\n", None, "is a PIR file, in which titles follow the names: convert it to FASTA"),
        (">a\nMKV\n>b\n>c\nM\n", 3, "without a sequence"),
        (">a\nMKV\n>b", 3, "without a sequence"),
        (">a\nMKV\n>é\nMKV\nM\xc9V\n", 5, "residues must be ASCII letters"),
        (b">a\nMKV\n>\xe9\nMKV\n", 3, "not UTF-8"),
        (">a\nMKV>b\nMK\n", 2, "a '>' within a sequence: put a line end before the record that begins there"),
        (">a > c\nMKV\n>b >\nMKV\n\nM >c\nMK\n>d\nM\n", 6, "a '>' within a sequence"),
        (">a\r\nMKV\r\n>b\r\nMKV>c", 4, "a '>' within a sequence"),
    ],
)
def test_errors_contain_file_and_line(tmp_path, content, line, message):
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=message) as error:
        open_sequences("fasta_fields_mmap", [path])
    assert str(error.value).startswith(f"{path}:{line}" if line else f"{path} ") and "\n" not in str(error.value)


def test_the_number_of_stop_codons_is_noted_once(tmp_path, caplog):
    path = write(tmp_path, ">a\nMKV*\n>b\nMK\nV*\n>c\nM*K\n>d\nMKV\n*\n\n>e\nM K V * *\n")
    for _ in range(2):  # the second one reads the index
        source = open_sequences("fasta_fields_mmap", [path])
        assert [source.text(number) for number in range(5)] == ["MKV", "MKV", "M*K", "MKV", "MKV"]
    (note,) = caplog.messages
    assert note.startswith(f"{path}: the '*' at the end of 4 of 5 sequences is dropped")


@pytest.mark.parametrize(("content", "line"), [(">a\nMK<mask>V\n", 2), (">b\nM\n>a\nMKV\nL<mask>\n", 5)])
def test_special_tokens_are_refused(tmp_path, content, line):
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=rf"x.fasta:{line} contains '<mask>'"):
        open_sequences("fasta_fields_mmap", [path])
