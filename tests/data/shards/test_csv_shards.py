# SPDX-License-Identifier: Apache-2.0
import csv
import io
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from tests.support.sequence_files import open_sequences

CELL = st.text(st.sampled_from('ACDEF,;"\n é中\t'), max_size=12)


PROTEIN_CELL = st.text(st.sampled_from('ACDw* \t-"'), max_size=20)


def gathered(source, records, starts, counts):
    """Gather with a gap between the pieces, which must stay unmodified."""
    positions = np.cumsum(counts + 1) - counts
    out = np.full(int((counts + 1).sum()) + 1, 255, np.uint8)
    source.gather(np.array(records), np.array(starts), np.array(counts), out, positions)
    pieces = [out[p : p + c].tobytes() for p, c in zip(positions, counts, strict=True)]
    assert np.count_nonzero(out == 255) == len(out) - sum(map(len, pieces))
    return pieces


@st.composite
def csv_files(draw):
    columns = draw(st.integers(1, 4))
    row = st.lists(CELL, min_size=columns, max_size=columns)
    rows = draw(st.lists(row, min_size=1, max_size=8))
    separator = draw(st.sampled_from(",;\t"))
    text = io.StringIO(newline="")
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(
        text, delimiter=separator, lineterminator=draw(st.sampled_from(["\n", "\r\n"])), quoting=quoting
    )
    header = draw(st.lists(row, max_size=2))
    writer.writerows(header + rows)
    text = text.getvalue()
    if draw(st.booleans()):
        text = text[:-1] if text[-2] != "\r" else text[:-2]
    else:
        text += draw(st.sampled_from(["", "\n", "\r\n\n"]))
    data = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode()
    fields = draw(st.dictionaries(st.sampled_from(["sequence", "id", "n"]), st.integers(0, columns - 1), min_size=1))
    return data, separator, len(header), fields


def test_blank_lines_are_no_records_of_a_single_column(tmp_path):
    path = write(tmp_path, "MKV\n\nMA\n\n")
    source = open_sequences("csv_fields_mmap", [path], data_fields={"sequence": 0}, header_lines=0)
    assert source.lengths.tolist() == [3, 2]


@settings(max_examples=100)
@given(csv_files(), st.data())
def test_cells_equal_those_of_the_csv_module(tmp_path_factory, file, data):
    content, separator, header_lines, fields = file
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    path.write_bytes(content)
    with path.open(encoding="utf-8-sig", newline="") as text:
        rows = [row for row in csv.reader(text, delimiter=separator) if row][header_lines:]
    options = {"data_fields": fields, "data_sep": separator, "header_lines": header_lines}
    source = open_sequences("csv_fields_mmap", [path], **options)

    assert [source.fields(i) for i in range(len(source))] == [
        {name: row[column] for name, column in fields.items()} for row in rows
    ]
    sequences = [row[fields.get("sequence", next(iter(fields.values())))].encode() for row in rows]
    assert [source.text(i).encode() for i in range(len(source))] == sequences
    assert source.lengths.tolist() == [len(sequence) for sequence in sequences]

    records = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    starts = np.array([data.draw(st.integers(0, len(sequences[i]))) for i in records])
    counts = np.array([data.draw(st.integers(0, len(sequences[i]) - s)) for i, s in zip(records, starts, strict=True)])
    expected = [sequences[i][s : s + c] for i, s, c in zip(records, starts, counts, strict=True)]
    assert gathered(source, records, starts, counts) == expected


def write(tmp_path, content, name="x.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_shards_are_numbered_consecutively_and_can_be_pickled(tmp_path):
    texts = [["MKV", "A", "CC"], ["WWWW"], ["LL", "MMM"]]
    paths = [
        write(tmp_path, "id,s\n" + "".join(f"1,{t}\n" for t in each), f"x{i}.csv") for i, each in enumerate(texts)
    ]
    source = open_sequences("csv_mmap", paths, data_col=1, workers=2)
    for opened in (source, pickle.loads(pickle.dumps(source))):
        assert [opened.text(i) for i in range(len(opened))] == [text for each in texts for text in each]
        assert opened.lengths.dtype == np.int32 and opened.lengths.tolist() == [3, 1, 2, 4, 2, 3]
        pieces = gathered(opened, [5, 0, 3, 0], np.array([1, 0, 2, 2]), np.array([2, 3, 1, 1]))
        assert pieces == [b"MM", b"MKV", b"W", b"V"]


@pytest.mark.parametrize(
    ("records", "starts", "counts"), [([3], [0], [1]), ([-1], [0], [1]), ([0], [2], [2]), ([0], [-1], [1])]
)
def test_positions_outside_the_data_are_an_error(tmp_path, records, starts, counts):
    source = open_sequences("csv_mmap", [write(tmp_path, "s\nMKV\nA\nCC\n")], data_col=0)
    with pytest.raises(IndexError):
        source.gather(*map(np.array, (records, starts, counts)), np.zeros(9, np.uint8), np.array([0]))
    with pytest.raises(IndexError):
        source.text(3)


def test_line_ends_and_blank_lines_are_ignored(tmp_path):
    source = open_sequences("csv_mmap", [write(tmp_path, "id,s\r\n1,MKV\r\n\n2,AA\r\n\r\n")], data_col=1)
    assert [source.text(i) for i in range(len(source))] == ["MKV", "AA"]


def test_other_record_separators(tmp_path):
    source = open_sequences("csv_mmap", [write(tmp_path, "id,s|1,MKV|2,A\nA")], data_col=1, newline_int=ord("|"))
    assert [source.text(i) for i in range(2)] == ["MKV", "A\nA"]


HEAD = "id,name,sequence_length,sequence\n"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", None, "is empty"),
        (HEAD, None, "contains no records"),
        (HEAD + "\n\n", None, "contains no records"),
        (HEAD + "1,a,3,MKV\n2,b\n3,c,1,M\n", 3, "2 columns, where field 'sequence' needs 4"),
        (HEAD + '1,"a\nb",3,MKV\n2\n', 4, "1 column, where"),
        (HEAD + "1,a,3,MKV\n2,b,9,MKVA", 3, "4 of 9 letters"),
        (f"{HEAD}1,a,3,MKV\n2,b,{300_000},{'M' * 200_000}", 3, "200000 of 300000 letters"),
        (HEAD + "1,a,3,MKV\n2,b", 3, "ends inside this line"),
        (HEAD.encode() + b"1,a,3,MKV\n2,\xff,3,MKV\n", 3, "not UTF-8"),
        (HEAD + '1,a"b,3,MKV\n2,b,1,"M"\n', 2, "quote in the middle"),
        (HEAD + '1,"a"b,3,MKV\n', 2, "quote in the middle"),
        (HEAD.replace("id", 'i"d', 1) + "1,a,3,MKV\n", 1, "quote"),
        (HEAD + '1,a,3,MKV\n2,b,3,"MKV\n', 3, "one that is not closed"),
    ],
)
def test_errors_contain_file_and_line(tmp_path, content, line, message):
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=message) as error:
        open_sequences("csv_mmap", [path], data_col=3)
    assert str(error.value).startswith(f"{path}:{line}: " if line else f"{path} ") and "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.csv"]


def test_a_complete_last_line_needs_no_line_end(tmp_path):
    assert open_sequences("csv_mmap", [write(tmp_path, HEAD + "1,a,3,MKV")], data_col=3).text(0) == "MKV"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_impl": "csv_mmap", "data_col": -1}, "field 'sequence' is negative: columns are counted from 0"),
        ({"data_impl": "csv_mmap", "data_col": 1}, "1 column, where field 'sequence' needs 2"),
        ({"data_impl": "csv_fields_mmap", "data_fields": {}}, "no column is selected"),
        ({"data_impl": "csv_fields_mmap", "data_fields": {"sequence": 0, "id": -2}}, "field 'id' is negative"),
        ({"data_impl": "csv_mmap", "data_col": 0, "data_sep": "::"}, "one ASCII character"),
        ({"data_impl": "csv_mmap", "data_col": 0, "data_sep": "\n"}, "same character"),
    ],
)
def test_wrong_options(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        open_sequences(paths=[write(tmp_path, "s\nM\n")], **arguments)


def test_only_regular_files(tmp_path):
    for path, message in ((tmp_path, "not a regular file"), (tmp_path / "none.csv", "cannot be opened")):
        with pytest.raises(UserError, match=message):
            open_sequences("csv_mmap", [path], data_col=0)
    with pytest.raises(UserError, match="no data files"):
        open_sequences("csv_mmap", [], data_col=0)


@given(
    st.lists(st.text(st.sampled_from('ACDw* \t-"'), max_size=20), min_size=1, max_size=8),
    st.data(),
)
def test_white_space_and_stop_codons_are_not_part_of_proteins(tmp_path_factory, cells, data):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    rows = "".join('a b*,"{}",*\n'.format(cell.replace('"', '""')) for cell in cells)
    path.write_text(f"name,sequence,other\n{rows}")
    columns = {"id": 0, "sequence": 1, "other": 2}
    expected = ["".join(cell.split()).rstrip("*") for cell in cells]
    source = open_sequences("csv_fields_mmap", [path], data_fields=columns, proteins=True)
    other = open_sequences("csv_fields_mmap", [path], data_fields=columns)
    assert [source.fields(n) for n in range(len(cells))] == [
        {"id": "a b*", "sequence": text, "other": "*"} for text in expected
    ]
    assert source.lengths.tolist() == list(map(len, expected))
    assert [other.text(n) for n in range(len(cells))] == cells  # not proteins: unchanged
    starts = np.array([data.draw(st.integers(0, len(text))) for text in expected])
    counts = source.lengths - starts
    out = np.zeros(int(counts.sum()), np.uint8)
    source.gather(np.arange(len(cells)), starts, counts, out, np.cumsum(counts) - counts)
    assert out.tobytes().decode() == "".join(text[start:] for text, start in zip(expected, starts, strict=True))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("MK<mask>V", "x.csv:3 contains '<mask>': special tokens are not read from text"),
        ("MKé", r"x.csv:3 contains 'é' \(U\+00E9\): residues must be ASCII letters"),
        ('"MK\rVA"', r"x\.csv:3: a carriage return inside a line"),
    ],
)
def test_special_tokens_and_other_letters_are_refused_in_proteins(tmp_path, cell, message):
    path = tmp_path / "x.csv"
    path.write_text(f"name,sequence\n<é>,MK<V\nb,{cell}\n", newline="")
    with pytest.raises(UserError, match=message):
        open_sequences("csv_mmap", [path], data_col=1, proteins=True)
    assert open_sequences("csv_mmap", [path], data_col=1).text(1) == cell.strip('"')


def test_a_stop_codon_in_the_last_line_is_no_truncated_line(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("record_id,record_name,sequence_length,sequence\n0,a,4,MKV*")
    assert open_sequences("csv_mmap", [path], data_col=3, proteins=True).text(0) == "MKV"
