# SPDX-License-Identifier: Apache-2.0
"""Generated clusters and members, in a different order in every file, compared with the mapping."""

import gzip
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.preparation import uniref
from bionemo.preparation.manifest import verify
from tests.support.preparation import left, parse, shards, small
from tests.support.preparation_uniref import FILES, TABLE, UF50, UF90, VALID, make_job, prepare

RAW = (TABLE, UF50, VALID, UF90)
HEADER = "uniref50\tuniref90\n"


@dataclass
class Data:
    """Texts of the raw files, and the members of each cluster in the order of the mapping."""

    members: dict[str, list[str]]
    texts: dict[str, str]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (folder / name).write_bytes(text.encode())
        return folder

    def expected(self, members: dict[str, list[str]] | None = None, files: int = FILES) -> dict[str, bytes]:
        """Return the expected files in uf50 and uf90."""
        truth = self.members if members is None else members
        counts = [len(names) for names in truth.values()]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        result = {
            f"uf50/train/{name}.mmap": np.array(numbers, np.uint64).tobytes()
            for name, numbers in (("counts", counts), ("starts", starts))
        }
        everyone = [name for names in truth.values() for name in names]
        for folder, file, names in (
            ("uf50/train", UF50, list(truth)),
            ("uf90/uf90_csvs", UF90, everyone),
            ("uf50/val", VALID, None),
            ("uf50/test", VALID, None),
        ):
            records = parse(self.texts[file].encode())
            number = {name: i for i, (name, _) in reversed([*enumerate(records)])}
            order = [*range(len(records))] if names is None else [number[name] for name in names]
            for i, piece in enumerate(np.array_split(np.array(order, int), min(files, len(order)))):
                rows = (f"{j + 1},{records[j][0]},{len(records[j][1])},{records[j][1]}\n" for j in piece.tolist())
                text = "record_id,record_name,sequence_length,sequence\n" + "".join(rows)
                result[f"{folder}/x{i:03}.csv"] = text.encode()
        return result


def generate(clusters: int, seed: int = 0) -> Data:
    rng = random.Random(seed)

    def fasta(names: Sequence[str]) -> str:
        shuffled = rng.sample(list(names), len(names))
        return "".join(
            f">{n} x\n{''.join(rng.choices('ACDEFGHIKLMNPQRSTVWY', k=rng.randint(1, 30)))}\n" for n in shuffled
        )

    members = {f"UniRef50_{i}": [f"UniRef90_{i}.{j}" for j in range(rng.randint(1, 6))] for i in range(clusters)}
    members = dict(rng.sample([*members.items()], clusters))
    texts = {
        UF50: fasta([*members]),
        UF90: fasta([name for names in members.values() for name in names]),
        VALID: fasta([f"v{i}" for i in range(7)]),
        TABLE: HEADER + "".join(f"{name}\t{','.join(names)}\n" for name, names in members.items()),
    }
    return Data(members, texts)


def hand_made() -> Data:
    """Return three clusters with 2, 1 and 3 members, in lines 2, 3 and 4 of the mapping."""
    return Data(
        {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
        {
            UF50: ">C\nCCC\n>A\nAAA\n>B\nBBB\n",
            UF90: ">c2\nCC\n>a2\nAA\n>b1\nB\n>c3\nCCC\n>c1\nC\n>a1\nA\n",
            VALID: ">v2\nVV\n>v1\nV\n",
            TABLE: HEADER + "A\ta1,a2\nB\tb1\nC\tc1,c2,c3\n",
        },
    )


@contextmanager
def tiny(scale: int = 1) -> Iterator[None]:
    """Use tiny chunks, also for the mapping."""
    sizes = {"chunk": 30, "block": 40, "bucket": 90, "partition": 4}
    with small(**{name: size * scale for name, size in sizes.items()}):
        yield


def made(output: Path) -> dict[str, bytes]:
    """Return all files in uf50 and uf90."""
    return shards(output) | {p.relative_to(output).as_posix(): p.read_bytes() for p in output.rglob("*.mmap")}


@pytest.mark.parametrize("cut", [False, True])
def test_all_output_files(tmp_path: Path, cut: bool) -> None:
    data = generate(60)
    source = data.write(tmp_path / "source")
    if cut:
        with tiny(8):
            manifest = prepare(source, tmp_path / "out")
    else:
        manifest = prepare(source, tmp_path / "out")
    assert made(tmp_path / "out") == data.expected()
    names = [f"x{i:03}.csv" for i in range(FILES)]
    folders = ("uf50/train", "uf50/val", "uf50/test", "uf90/uf90_csvs")
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()} == {
        *(f"{folder}/{name}" for folder in folders for name in names),
        *("uf50/train/starts.mmap", "uf50/train/counts.mmap", "manifest.json"),
    }
    assert {Path(file.source).name for file in manifest.inputs} == set(RAW)
    members = sum(map(len, data.members.values()))
    assert {name: (tally.read, tally.written) for name, tally in manifest.tallies.items()} == {
        **{UF50: (60, 60), UF90: (members, members)},
        **{f"{VALID} for uf50/{split}": (7, 7) for split in ("val", "test")},
    }


def test_a_cluster_and_its_members_are_found_by_starts_and_counts(tmp_path: Path) -> None:
    data = generate(25, seed=4)
    prepare(data.write(tmp_path / "source"), tmp_path / "out")
    starts, counts = (
        np.fromfile(tmp_path / f"out/uf50/train/{name}.mmap", np.uint64) for name in ("starts", "counts")
    )

    def names(folder: str) -> list[str]:
        paths = sorted((tmp_path / "out" / folder).glob("*.csv"))
        return [line.split(",")[1] for path in paths for line in path.read_text().splitlines()[1:]]

    everyone = names("uf90/uf90_csvs")
    assert names("uf50/train") == list(data.members)
    for cluster, start, count in zip(names("uf50/train"), starts.tolist(), counts.tolist(), strict=True):
        assert everyone[start : start + count] == data.members[cluster]


def test_workers_and_gzip_do_not_change_the_result(tmp_path: Path) -> None:
    data = generate(60)
    source = data.write(tmp_path / "source")
    for name in (UF50, UF90, VALID):
        (source / name).write_bytes(gzip.compress(data.texts[name].encode()))
    uniref.prepare(make_job(source, tmp_path / "out", num_preprocess_workers=2))
    assert verify(tmp_path / "out") == [] and made(tmp_path / "out") == data.expected()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({TABLE: ("c3\n", "c3,c4\n")}, "{t}:4: cluster C has the member c4, which is missing in {s}/UF90 (1 such mem"),
        (
            {TABLE: ("B\tb1\n", "B\tb2,b1,b3\n")},
            "{t}:3: cluster B has the member b2, which is missing in {s}/UF90 (2 such",
        ),
        ({TABLE: ("C\t", "D\tc9\nC\t")}, "{t}:4: cluster D, which is missing in {s}/UF50 (1 such clusters): use"),
        (
            {TABLE: ("C\tc1", "\n\r\nC\tc1,a2")},
            "{t}:6: cluster C has the member a2, which is also at {t}:2 (1 such",
        ),
        ({TABLE: ("a1,a2", "a1,a2,a1")}, "{t}:2: cluster A has the member a1, which is also at {t}:2 (1 such mem"),
        ({TABLE: ("C\t", "\nA\ta3\nC\t")}, "{t}:5: cluster A, which is also at {t}:2 (1 such clusters): correct"),
        ({TABLE: ("B\tb1", "B\t")}, "{t}:3: cluster B has no members: correct the table, or set on_unknown=skip"),
        ({TABLE: ("B\tb1", "B\t,,\tb1")}, "{t}:3: cluster B has no members"),
        ({TABLE: ("B\tb1", "\n\nB b1")}, "{t}:5: no tab in 'B b1': expected cluster name, tab, comma-sep"),
        ({TABLE: ("C\tc1,c2,c3\n", "C")}, "{t}:4: no tab in 'C': "),
        ({TABLE: ("A\ta1,a2\nB\tb1\nC\tc1,c2,c3\n", "")}, "{t} contains no cluster below its header"),
        ({TABLE: ("A\ta1,a2\nB\tb1\nC\tc1,c2,c3\n", "\n\n")}, "{t} contains no cluster below its header"),
        ({TABLE: (HEADER + "A\ta1,a2\nB\tb1\nC\tc1,c2,c3\n", "")}, "{t} contains no cluster below its header"),
        (
            {UF90: (">c3", ">a2")},
            "{s}/UF90:7: record 'a2' has the same name as the record at {s}/UF90:3 (1 such records)",
        ),
        (
            {UF50: (">B", ">C")},
            "{s}/UF50:5: record 'C' has the same name as the record at {s}/UF50:1 (1 such records)",
        ),
        (
            {VALID: (">v1", ">v2")},
            "{s}/VALID:3: record 'v2' has the same name as the record at {s}/VALID:1 (1 such records)",
        ),
        ({UF90: ("\nAA\n", "\nA*\n")}, "{s}/UF90:3: record 'a2' has '*' in its sequence: correct it, or set on_lett"),
        ({UF50: ("\nAAA\n", "\n")}, "{s}/UF50:3: record 'A' has no sequence: remove or complete it, or set on_emp"),
        ({VALID: (">v2", "v2")}, "{s}/VALID:1: text before the first '>'"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, change: dict[str, tuple[str, str]], message: str) -> None:
    for number, cut in enumerate((False, True)):
        data = hand_made()
        for name, (old, new) in change.items():
            assert data.texts[name].count(old) == 1
            data.texts[name] = data.texts[name].replace(old, new)
        source = data.write(tmp_path / str(number))
        expected = message.replace("{t}", f"{source}/{TABLE}").replace("{s}", str(source))
        for short, name in (("UF50", UF50), ("UF90", UF90), ("VALID", VALID)):
            expected = expected.replace(f"/{short}", f"/{name}")
        with pytest.raises(UserError) as error:
            if cut:
                with tiny():
                    prepare(source, tmp_path / "out")
            else:
                prepare(source, tmp_path / "out")
        assert str(error.value).startswith(expected) and "\n" not in str(error.value)
        assert not left(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "policies", "expected", "expected_counts"),
    [
        (  # members without a sequence
            {TABLE: ("B\tb1", "B\tb0,b1,b2")},
            ["unknown"],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
            {UF90: ({}, {"members of the table excluded": 2})},
        ),
        (  # a cluster without a sequence, and its members
            {UF50: (">A\nAAA\n", "")},
            ["unknown"],
            {"B": ["b1"], "C": ["c1", "c2", "c3"]},
            {
                UF50: ({}, {"clusters of the table excluded": 1}),
                UF90: ({"not in the mapping": 2}, {"members of the table excluded": 2}),
            },
        ),
        (  # a cluster that loses all its members
            {UF90: (">b1\nB\n", "")},
            ["unknown"],
            {"A": ["a1", "a2"], "C": ["c1", "c2", "c3"]},
            {
                UF50: ({"not in the mapping": 1}, {"clusters of the table excluded": 1}),
                UF90: ({}, {"members of the table excluded": 1}),
            },
        ),
        (  # the first and the last cluster at once, and one without members
            {
                UF90: (">c3\nCCC\n>c1\nC\n>a1\nA\n", ""),
                TABLE: ("A\ta1,a2\nB", "D\t\nA\ta1\nB"),
                UF50: (">B", ">D\nDD\n>B"),
            },
            ["unknown"],
            {"B": ["b1"], "C": ["c2"]},
            {
                UF50: ({"not in the mapping": 2}, {"clusters of the table excluded": 2}),
                UF90: ({"not in the mapping": 1}, {"members of the table excluded": 3}),
            },
        ),
        (  # a member of two clusters, and twice in one
            {TABLE: ("C\tc1", "C\tb1,c1,c1,a2")},
            ["shared"],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
            {UF90: ({}, {"members of the table excluded": 3})},
        ),
        (  # a cluster whose members all belong to other clusters
            {TABLE: ("B\tb1", "B\ta2,a1")},
            ["shared"],
            {"A": ["a1", "a2"], "C": ["c1", "c2", "c3"]},
            {
                UF50: ({"not in the mapping": 1}, {"clusters of the table excluded": 1}),
                UF90: ({"not in the mapping": 1}, {"members of the table excluded": 2}),
            },
        ),
        (  # a cluster twice
            {TABLE: ("C\t", "A\tx1\nC\t")},
            ["shared"],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
            {UF50: ({}, {"clusters of the table excluded": 1}), UF90: ({}, {"members of the table excluded": 1})},
        ),
        (  # sequences of no cluster
            {UF50: (">A", ">X\nXX\n>A"), UF90: (">b1", ">x1\nX\n>x2\nXX\n>b1")},
            [],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
            {UF50: ({"not in the mapping": 1}, {}), UF90: ({"not in the mapping": 2}, {})},
        ),
        (  # a sequence twice
            {UF50: (">B", ">C\nXX\n>B"), UF90: (">a1\nA\n", ">a1\nA\n>c2\nXXX\n>a1\nXX\n")},
            ["duplicate"],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]},
            {UF50: ({"duplicate": 1}, {}), UF90: ({"duplicate": 2}, {})},
        ),
        (  # one too many and one missing, so that the counts agree
            {UF90: (">c3\nCCC", ">a2\nXX")},
            ["duplicate", "unknown"],
            {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2"]},
            {UF90: ({"duplicate": 1}, {"members of the table excluded": 1})},
        ),
        (  # omitted sequences leave a gap in the mapping
            {UF50: ("\nBBB\n", "\nB*B\n"), UF90: ("\nAA\n", "\n\n")},
            ["letters", "empty", "unknown"],
            {"A": ["a1"], "C": ["c1", "c2", "c3"]},
            {
                UF50: ({"invalid letters": 1}, {"clusters of the table excluded": 1}),
                UF90: ({"empty": 1, "not in the mapping": 1}, {"members of the table excluded": 2}),
            },
        ),
        *(  # other table formats
            ({TABLE: change}, [], {"A": ["a1", "a2"], "B": ["b1"], "C": ["c1", "c2", "c3"]}, {})
            for change in (
                ("a2\nB", "a2\textra,column\t7\nB"),
                ("a2\nB", "a2,\nB"),
                ("A\ta1,a2", "A\t,a1,,a2,\tx"),
                ("B\tb1", "\n\nB\tb1\n\n"),
                ("c3\n", "c3"),
                (HEADER, "x\n"),
            )
        ),
    ],
)
@pytest.mark.parametrize("crlf", [False, True])
def test_policies_and_other_ways_to_write_a_table(
    tmp_path: Path,
    change: dict[str, tuple[str, str]],
    policies: list[str],
    expected: dict[str, list[str]],
    expected_counts: dict[str, tuple[dict[str, int], dict[str, int]]],
    crlf: bool,
) -> None:
    data = hand_made()
    for name, (old, new) in change.items():
        assert data.texts[name].count(old) == 1
        data.texts[name] = data.texts[name].replace(old, new)
    truth = data.expected(expected)
    if crlf:
        data.texts[TABLE] = data.texts[TABLE].replace("\n", "\r\n")
    source = data.write(tmp_path / "source")
    changes = {f"on_{policy}": "skip" for policy in policies}
    for name, cut in (("whole", False), ("cut", True)):
        if cut:
            with tiny():
                manifest = prepare(source, tmp_path / name, **changes)
        else:
            manifest = prepare(source, tmp_path / name, **changes)
        assert made(tmp_path / name) == truth
        for file in (UF50, UF90):
            dropped, changed = expected_counts.get(file, ({}, {}))
            tally = manifest.tallies[file]
            assert tally.dropped == dropped, file
            assert {what: number for what, number in tally.changed.items() if number} == changed, file


@pytest.mark.parametrize("seed", range(3))
def test_missing_sequences(tmp_path: Path, seed: int) -> None:
    data, rng = generate(40, seed), random.Random(seed)
    members = [name for names in data.members.values() for name in names]
    lost = {*rng.sample(members, 50), *rng.sample([*data.members], 5)}
    for name in (UF50, UF90):
        records = [f">{text}" for text in data.texts[name].split(">")[1:]]
        data.texts[name] = "".join(record for record in records if record[1:].split()[0] not in lost)
    with tiny(8):
        prepare(data.write(tmp_path / "source"), tmp_path / "out", on_unknown="skip", num_csv_files=30)
    found = {c: [m for m in names if m not in lost] for c, names in data.members.items() if c not in lost}
    found = {cluster: names for cluster, names in found.items() if names}
    assert made(tmp_path / "out") == data.expected(found, files=30)


def test_no_cluster_is_left(tmp_path: Path) -> None:
    data = hand_made()
    data.texts[UF90] = ">x\nX\n"
    source = data.write(tmp_path / "source")
    with pytest.raises(UserError, match=rf"no cluster of {source / TABLE} has a sequence in .* and a member in"):
        prepare(source, tmp_path / "out", on_unknown="skip")
    assert not left(tmp_path / "out")


@pytest.mark.parametrize("link", [False, True])
def test_raw_files_may_be_in_the_output(tmp_path: Path, link: bool) -> None:
    data = hand_made()
    out = tmp_path / "out"
    if link:
        out.mkdir()
        for path in data.write(tmp_path / "elsewhere").iterdir():
            (out / path.name).symlink_to(path)
    else:
        data.write(out)
    (out / "README.md").write_text("mine")
    before = {name: (out / name).lstat().st_ino for name in (*RAW, "README.md")}
    manifest = prepare(out, out)
    assert made(out) == data.expected()
    prepare(out, out, force=True)
    assert {name: (out / name).lstat().st_ino for name in before} == before
    assert not {*RAW, "README.md"} & {*manifest.files} and {Path(file.source).name for file in manifest.inputs} == {
        *RAW
    }
    assert made(out) == data.expected() and (out / "README.md").read_text() == "mine"


def test_two_files_of_one_name(tmp_path: Path) -> None:
    source = hand_made().write(tmp_path / "source")
    (source / "other").mkdir()
    (source / UF90).rename(source / "other" / UF50)
    with pytest.raises(UserError, match="have the same name: rename one"):
        prepare(source, tmp_path / "out", uf90_datapath=str(source / "other" / UF50))
    assert not left(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "key"),
    [(UF50, "uf50_datapath"), (UF90, "uf90_datapath"), (VALID, "val_datapath"), (TABLE, "cluster_mapping_tsv")],
)
def test_a_missing_file_is_named_with_its_key(tmp_path: Path, name: str, key: str) -> None:
    source = hand_made().write(tmp_path / "source")
    (source / name).unlink()
    with pytest.raises(UserError, match=rf"^{key}: there is no file {source / name}: "):
        prepare(source, tmp_path / "out")
    assert not left(tmp_path / "out")


def test_the_mapping_may_have_the_v1_name(tmp_path: Path) -> None:
    data = hand_made()
    source = data.write(tmp_path / "source")
    name = "uniref50_mapper_to_uniref90clustermembers_andselfuniref50.tsv"
    (source / TABLE).rename(source / name)
    prepare(source, tmp_path / "out")
    assert made(tmp_path / "out") == data.expected()


def test_parameters_must_be_equal_and_input_files_may_be_missing(tmp_path: Path) -> None:
    source = hand_made().write(tmp_path / "source")
    prepare(source, tmp_path / "out")
    prepare(tmp_path / "nowhere", tmp_path / "out")  # already prepared
    with pytest.raises(UserError, match="was prepared with num_csv_files=3, not 4"):
        prepare(source, tmp_path / "out", num_csv_files=4)
    with pytest.raises(UserError, match="was prepared with on_shared=error, not skip"):
        prepare(source, tmp_path / "out", on_shared="skip")


def test_user_sequences_replace_the_clusters(tmp_path: Path) -> None:
    texts = {"train": ">a\nMK\n>b\nM\n>c\nKK\n>d\nV\n", "val": ">e x\nMK\nL\n"}
    own: dict[str, str | None] = {"test": None}
    for split, text in texts.items():
        own[split] = str(tmp_path / f"{split}.fa")
        (tmp_path / f"{split}.fa").write_text(text)
    manifest = prepare(tmp_path / "nowhere", tmp_path / "out", custom_pretraining_fasta_path=own)
    assert {path.name for path in left(tmp_path / "out")} == {"train", "val", "manifest.json"}
    header = b"record_id,record_name,sequence_length,sequence\n"
    assert made(tmp_path / "out") == {
        "train/x000.csv": header + b"1,a,2,MK\n2,b,1,M\n",
        "train/x001.csv": header + b"3,c,2,KK\n",
        "train/x002.csv": header + b"4,d,1,V\n",
        "val/x000.csv": header + b"1,e,3,MKL\n",
    }
    assert sorted(Path(file.source).name for file in manifest.inputs) == ["train.fa", "val.fa"]
    own["test"] = str(tmp_path / "none.fa")
    with pytest.raises(UserError, match="splits="):
        prepare(tmp_path / "nowhere", tmp_path / "out", custom_pretraining_fasta_path=own)
    with pytest.raises(UserError, match=r"test.custom_pretraining_fasta_path: there is no file"):
        prepare(tmp_path / "nowhere", tmp_path / "out2", custom_pretraining_fasta_path=own)
    with pytest.raises(UserError, match="contains own sequences data"):
        prepare(hand_made().write(tmp_path / "source"), tmp_path / "out")
