# SPDX-License-Identifier: Apache-2.0
"""Policies for invalid records: an error with file and line, or dropped and counted."""

import gzip
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.preparation import sequences
from tests.support.preparation import generated, inline, left, make_job, prepare, rows, small, write

SMALL = {"chunk": 8, "block": 4, "bucket": 20, "partition": 2}


@dataclass(frozen=True)
class Case:
    """A file with an invalid record."""

    content: str | bytes  # content of the file
    # parts of the message, in this order, if all policies are `error`; the first contains the line
    error: tuple[str, ...]
    # number, name and sequence of the records that are kept, by policy
    kept: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)  # counts of dropped records, by policy
    changed: dict[str, dict[str, int]] = field(default_factory=dict)  # counts of changed records, by policy


A, B, C = (1, "a", "MKV"), (2, "b", "MK"), (3, "c", "VLA")
WITHOUT_B = [A, C]


def strange(letters: str, letter: str, strip: str | None = None, keep: bool = True) -> Case:
    """Return a case in which the second of three sequences contains invalid letters."""
    kept, changed = {"on_letters=skip": WITHOUT_B}, {}
    if strip is not None:
        kept["on_letters=strip"] = [A, (2, "b", strip), C]
        changed["on_letters=strip"] = {"with letters stripped": 1}
    if keep:
        kept["on_letters=keep"] = [A, (2, "b", letters.replace("\n", "").upper()), C]
    dropped = {"on_letters=skip": {"invalid letters": 1}}
    hint = ", strip" if keep else ""
    error = (":3: record 'b' has ", letter, " in its sequence", f"set on_letters=skip{hint}")
    return Case(f">a\nMKV\n>b more\n{letters}\n>c\nVLA\n", error, kept, dropped, changed)


CASES = {
    "text at the top": Case("\n\nMKV\n>a\nMKV\n", (":3: text before the first '>'",)),
    "a blank at the top": Case(" \n>a\nMKV\n", (":1: text before the first '>'",)),
    "records that ran together": Case(">a >\nMKV\n>b more\nMK\nV>c\nVLA\n", (":5: a '>' within a sequence: put",)),
    "no record": Case("\n\n\n", (" contains no records",)),
    "no sequence": Case(
        ">a\nMKV\n>b more\n\n\n>c\nVLA\n",
        (":3: record 'b' has no sequence: ", "set on_empty=skip"),
        {"on_empty=skip": WITHOUT_B},
        {"on_empty=skip": {"empty": 1}},
    ),
    "no sequence at the end": Case(
        "\n\n>a\nMKV\n>c\nVLA\n>b",
        (":7: record 'b' has no sequence: ", "set on_empty=skip"),
        {"on_empty=skip": [A, (2, "c", "VLA")]},
        {"on_empty=skip": {"empty": 1}},
    ),
    "no name": Case(
        ">a\nMKV\n>\nMK\n> c\nM\n>c\nVLA\n",
        (":3: record '' has no name: ", "set on_empty=skip"),
        {"on_empty=skip": [A, (4, "c", "VLA")]},
        {"on_empty=skip": {"empty": 2}},
    ),
    "same name": Case(
        "\n>a\nMKV\n>b\nMK\n>c\nVLA\n>b again\nLL\n>a x\nA\n>b\nC\n",
        (":8: record 'b' has the same name as the record at ", ":4 (3 such records)", "set on_duplicate=skip", "keep"),
        {
            "on_duplicate=skip": [A, B, C],
            "on_duplicate=keep": [A, B, C, (4, "b", "LL"), (5, "a", "A"), (6, "b", "C")],
        },
        {"on_duplicate=skip": {"duplicate": 3}},
    ),
    "star": strange("MK\nV*", "'*'", "MKV"),
    "dash": strange("M--K", "'-'", "MK"),
    "point": strange("M.K", "'.'", "MK"),
    "space in a sequence": strange("M K\nV L", "' '", "MKVL"),
    "space behind a line": strange("MK \nV", "' '", "MKV"),
    "tab in a sequence": strange("MK\tV", "'\\t'", "MKV"),
    "digit": strange("MK1V", "'1'"),
    "semicolon": strange("MK;V", "';'"),
    "control character": strange("MK\x01V", "'\\x01'"),
    "DEL": strange("MK\x7f", "'\\x7f'"),
    "comma": strange("MK,V", "','", keep=False),
    "quote": strange('MK"V', "'\"'", keep=False),
    "beyond ASCII": strange("MKé", "byte 0xc3", keep=False),
    "only stars": Case(
        ">a\nMKV\n>b\n**\n>c\nVLA\n",
        (":3: record 'b' has '*' in its sequence",),
        {"on_letters=strip on_empty=skip": WITHOUT_B},
        {"on_letters=strip on_empty=skip": {"empty": 1}},
        {"on_letters=strip on_empty=skip": {"with letters stripped": 1}},
    ),
    "name beyond UTF-8": Case(b">a\nMKV\n>\xe9b\nMK\n", (":3: record ", " has a name that is not UTF-8", "iconv")),
    "CR in a sequence": Case(">a\nMKV\n>b\nM\rK\n", (":4: a carriage return inside a line", "LF line ends")),
    "CR in a header": Case(">a\r\nMKV\r\n>b\rx\nMK\n", (":3: a carriage return inside a line",)),
    "empty file": Case("", (" is empty",)),
}
PERMITTED = [(name, policy) for name, case in CASES.items() for policy in case.kept]


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["whole", "cut"])
@pytest.mark.parametrize("name", ["x.fasta", "x.fasta.gz"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mistakes_name_file_and_line(tmp_path: Path, case: Case, name: str, sizes: dict[str, int]) -> None:
    source = write(tmp_path, case.content, name)
    with small(**sizes), pytest.raises(UserError) as error:
        prepare(source, tmp_path / "out", val_size=0, test_size=0)
    message = str(error.value)
    assert message.startswith(f"{source}{case.error[0]}") and "\n" not in message
    places = [message.find(part) for part in case.error]
    assert -1 not in places and places == sorted(places)
    assert not left(tmp_path / "out")


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["whole", "cut"])
@pytest.mark.parametrize(("name", "policy"), PERMITTED)
def test_policies_are_applied_and_counted(tmp_path: Path, name: str, policy: str, sizes: dict[str, int]) -> None:
    case = CASES[name]
    content = case.content if isinstance(case.content, bytes) else case.content.encode()
    changes = dict(item.split("=") for item in policy.split())
    with small(**sizes):
        manifest = prepare(write(tmp_path, content), tmp_path / "out", val_size=0, test_size=0, **changes)
    kept = case.kept[policy]
    found = rows(tmp_path / "out")["train"]
    assert sorted(found) == sorted([str(n), word, str(len(letters)), letters] for n, word, letters in kept)
    [tally] = manifest.tallies.values()
    assert tally.dropped == case.dropped.get(policy, {}) and tally.changed == case.changed.get(policy, {})
    assert (tally.read, tally.written) == (content.count(b"\n>") + content.startswith(b">"), len(kept))
    letters = sum(len(line) for line in content.split(b"\n") if not line.startswith(b">"))
    assert tally.letters_read == letters and tally.letters_written == sum(len(text) for _, _, text in kept)
    assert tally.letters_dropped == letters - tally.letters_written


def test_records_with_several_defects_are_counted_once(tmp_path: Path) -> None:
    text = ">a\nmk\n>\nM*\n>a\n\n>a\nM1\n>b\nM1\n>b\nK-k\n>a\nC\n>\n\n>b\nL\n>c\nM-\n"
    changes = {"on_empty": "skip", "on_letters": "skip", "on_duplicate": "skip", "val_size": 0, "test_size": 0}
    for number, sizes in enumerate(({}, SMALL)):
        out = tmp_path / str(number)
        with small(**sizes):
            manifest = prepare(write(tmp_path, text), out, **changes)
        # the first two records of b are dropped for their letters, so the third is its first
        assert sorted(row[:2] for row in rows(out)["train"]) == [["1", "a"], ["9", "b"]]
        [tally] = manifest.tallies.values()
        assert tally.dropped == {"invalid letters": 5, "empty": 2, "duplicate": 1}
        assert tally.read == 10 and tally.changed["with lower case letters"] == 2


@pytest.mark.parametrize("letters", ["M,K", 'M"K', "MKé"])
def test_letters_that_break_a_csv_field_are_never_kept(tmp_path: Path, letters: str) -> None:
    source = write(tmp_path, f">a\nMKV\n>b\n{letters}\n>c\nVLA\n")
    with pytest.raises(UserError, match=rf"^{source}:3: record 'b' has .* in its sequence: .*set on_letters=skip$"):
        prepare(source, tmp_path / "out", on_letters="keep")
    assert not left(tmp_path / "out")


def test_a_record_dropped_for_its_letters_needs_no_name(tmp_path: Path) -> None:
    source = write(tmp_path, ">\nM*\n>a\nMKV\n")
    manifest = prepare(source, tmp_path / "out", on_letters="skip", val_size=0, test_size=0)
    assert manifest.tallies["x.fasta"].dropped == {"invalid letters": 1}


def test_lower_case_and_line_ends_are_changed_and_counted(tmp_path: Path) -> None:
    text = ">A\nMKV\n>b\nmkV\n>c\nx\n>D\nM\n"
    manifest = prepare(write(tmp_path, text), tmp_path / "lower", val_size=0, test_size=0)
    assert manifest.tallies["x.fasta"].changed == {"with lower case letters": 2}
    assert [row[3] for row in sorted(rows(tmp_path / "lower")["train"])] == ["MKV", "MKV", "X", "M"]
    manifest = prepare(write(tmp_path, text.replace("\n", "\r\n")), tmp_path / "crlf", val_size=0, test_size=0)
    assert manifest.tallies["x.fasta"].changed == {"with CR LF line ends": 4, "with lower case letters": 2}
    assert rows(tmp_path / "crlf") == rows(tmp_path / "lower")


def test_duplicates_in_two_files_name_both(tmp_path: Path) -> None:
    sources = [write(tmp_path, ">a\nM\n>b\nK\n>c\nV\n", "1.fa"), write(tmp_path, "\n>d\nM\n\n>b x\nL\n", "2.fa")]
    with pytest.raises(
        UserError, match=rf"^{sources[1]}:5: record 'b' has the same name as the record at {sources[0]}:3 "
    ):
        prepare(sources, tmp_path / "out")
    with pytest.raises(
        UserError, match=rf"^{sources[1]}:2: record 'd' has the same name as the record at {sources[1]}:2 "
    ):
        prepare([sources[1], sources[1]], tmp_path / "out")  # the same file twice
    prepare(sources, tmp_path / "out", val_size=0, test_size=0, on_duplicate="skip")
    assert sorted(row[0] for row in rows(tmp_path / "out")["train"]) == ["1", "2", "3", "4"]


def test_many_duplicates_in_many_chunks(tmp_path: Path) -> None:
    names = np.random.default_rng(0).integers(0, 40, 200).tolist()
    text = "".join(f">n{name}\n{'M' * (i % 9 + 1)}\n" for i, name in enumerate(names))
    with small(chunk=50, block=30, bucket=100, partition=16):
        manifest = prepare(write(tmp_path, text), tmp_path / "out", val_size=3, test_size=3, on_duplicate="skip")
    first = {name: i + 1 for i, name in reversed([*enumerate(names)])}
    found = {row[1]: int(row[0]) for part in rows(tmp_path / "out").values() for row in part}
    assert found == {f"n{name}": number for name, number in first.items()}
    assert manifest.tallies["x.fasta"].dropped == {"duplicate": 200 - len(first)}


ZIPPED = gzip.compress(generated(20_000).encode(), 1)


@pytest.mark.parametrize(
    "damage", ["head", "half", "tail", "early bit", "middle bit", "checksum bit", "rubbish behind"]
)
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    data = bytearray(ZIPPED)
    if damage in ("head", "half", "tail"):
        del data[{"head": 5, "half": len(data) // 2, "tail": -3}[damage] :]
    elif damage == "rubbish behind":
        data += b"rubbish"
    else:
        data[{"early bit": 20, "middle bit": len(data) // 2, "checksum bit": -6}[damage]] ^= 0x55
    source = write(tmp_path, bytes(data))
    with pytest.raises(UserError) as error:
        prepare(source, tmp_path / "out", on_letters="keep", on_duplicate="keep", on_empty="skip")
    assert str(error.value).startswith(f"{source}: the gzip data is truncated or damaged (")
    assert "download it again" in str(error.value) and "\n" not in str(error.value)
    assert not left(tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.fasta", "missing.fasta does not exist: check the source"),
        (".", "cannot be read"),
        ("ftp://example.org/x.fasta", "ftp://"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, source: str, message: str) -> None:
    path = source if "://" in source else str(tmp_path / source)
    with pytest.raises(UserError, match=message) as error:
        prepare(path, tmp_path / "out")
    assert "\n" not in str(error.value) and not left(tmp_path / "out")


def test_an_empty_gzip_and_a_name_without_a_file(tmp_path: Path) -> None:
    source = write(tmp_path, b"", "x.fasta.gz")
    with pytest.raises(UserError, match=rf"^{source} is empty"):
        prepare(source, tmp_path / "out")
    assert not left(tmp_path / "out")


def test_downloads_stay_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "out/raw").mkdir(parents=True)
    write(tmp_path / "out/raw", ">a\nM1\n>b\nM\n>c\nM\n")
    with (
        patch.object(sequences, "worker_pool", inline),
        pytest.raises(UserError, match=r"https://example.org/x.fasta:1: "),
    ):
        sequences.prepare(make_job("https://me:secret@example.org/x.fasta?a=b", tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["raw", "x.fasta"]


def test_worker_processes_report_the_same_error(tmp_path: Path) -> None:
    source = write(tmp_path, generated(100) + ">n7\nMK\n")
    with pytest.raises(
        UserError, match=rf"^{source}:201: record 'n7' has the same name as the record at {source}:15 "
    ):
        prepare(source, tmp_path / "out", workers=2)
    assert not left(tmp_path / "out")
