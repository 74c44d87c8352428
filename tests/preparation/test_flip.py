# SPDX-License-Identifier: Apache-2.0
"""FLIP tasks with a few records and expected results written by hand."""

import csv
import gzip
import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import FlipJob
from bionemo.preparation.flip import SPLITS, TASKS, prepare
from bionemo.preparation.manifest import Manifest, verify
from tests.conftest import ROOT

TRAIN, VAL, TEST = "SET=train VALIDATION=False", "SET=train VALIDATION=True", "SET=test VALIDATION=False"
NUMBERS = (
    f">Sequence0 TARGET=-1.5e-07 {TRAIN}\r\nMKV\r\nL*\r\n\r\n>Sequence1 {VAL} TARGET=2.50\nmk\n"
    f">Sequence2\tTARGET=3 {TEST}\nAC\nD\n>Sequence3 TARGET=-.5 {TRAIN}\nW"
)
CLASSES = f">P1 TARGET=Cell membrane {TRAIN}\nMK\n>P2 {TEST} TARGET=Lysosome/Vacuole, M\nAC\n>P3 TARGET=a=b {VAL}\nD\n"
RESIDUES = ">1abc-A\nMK\nV\n>2abc-B\nac\n>3abc-C\nDE\n"
LABELS = f">3abc-C {TEST}\nEH\n>1abc-A {TRAIN}\nHcE\n>2abc-B {VAL}\nCC\n"
RESOLVED = f">1abc-A {TRAIN}\n101\n>2abc-B {TRAIN}\n00\n>3abc-C {TEST}\n11\n"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def run(source: Path | str, output: Path, task: str | list[str]) -> None:
    prepare(
        FlipJob(
            _target_="",
            output=str(output),
            force=False,
            num_preprocess_workers=1,
            engine="local",
            source=str(source),
            task_name=task,
        )
    )


def rows(output: Path) -> dict[str, list[list[str]]]:
    return {split: list(csv.reader((output / split / "x000.csv").open(newline=""))) for split in SPLITS}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """All eight tasks."""
    residues = {"sequences.fasta": RESIDUES, "sampled.fasta": LABELS, "resolved.fasta": RESOLVED}
    files = {
        **{f"{task}/{TASKS[task].sequences}": NUMBERS for task in ("aav", "gb1", "meltome")},
        **{f"{task}/{TASKS[task].sequences}": CLASSES for task in ("scl", "sav")},
        **{f"secondary_structure/{name}": text for name, text in residues.items()},
        **{f"conservation/{name}": text for name, text in residues.items() if name != "resolved.fasta"},
        "bind/sequences.fasta": RESIDUES + ">4\nM\n",
        "bind/from_publication.fasta": LABELS,
    }
    return write(tmp_path / "source", files)


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(source)))
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_numbers_are_written_unchanged(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "out", ["gb1"])
    assert (tmp_path / "out/gb1/train/x000.csv").read_text() == (
        "id,sequence,target\nSequence0,MKVL*,-1.5e-07\nSequence3,W,-.5\n"
    )
    assert rows(tmp_path / "out/gb1")["val"][1:] == [["Sequence1", "MK", "2.50"]]
    assert rows(tmp_path / "out/gb1")["test"][1:] == [["Sequence2", "ACD", "3"]]


def test_classes_keep_spaces_slashes_and_commas(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "out", "scl")
    head = ["id", "sequence", "scl_label"]
    assert rows(tmp_path / "out/scl") == {
        "train": [head, ["P1", "MK", "Cell membrane"]],
        "val": [head, ["P3", "D", "a=b"]],
        "test": [head, ["P2", "AC", "Lysosome/Vacuole, M"]],
    }


def test_labels_and_mask_join_their_sequence(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "out", "secondary_structure")
    head = ["id", "sequence", "3state", "resolved"]
    assert rows(tmp_path / "out/secondary_structure") == {
        "train": [head, ["1abc-A", "MKV", "HcE", "101"]],
        "val": [head, ["2abc-B", "AC", "CC", "00"]],
        "test": [head, ["3abc-C", "DE", "EH", "11"]],
    }


def test_all_tasks_and_their_record_counts(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "out", "all")
    found = {task: rows(tmp_path / "out" / task)["test"][0] for task in TASKS}
    assert {tuple(head): sorted(task for task in found if found[task] == head) for head in found.values()} == {
        ("id", "sequence", "target"): ["aav", "bind", "gb1", "meltome", "sav"],
        ("id", "sequence", "conservation"): ["conservation"],
        ("id", "sequence", "scl_label"): ["scl"],
        ("id", "sequence", "3state", "resolved"): ["secondary_structure"],
    }
    for task in TASKS:
        assert verify(tmp_path / "out" / task) == []
    manifest = Manifest.read(tmp_path / "out/bind")
    assert manifest is not None
    assert [Path(file.source).name for file in manifest.inputs] == ["sequences.fasta", "from_publication.fasta"]
    tally = manifest.tallies["sequences.fasta"]
    assert (tally.read, tally.written, tally.dropped) == (4, 3, {"not in from_publication.fasta": 1})


def test_downloads_and_local_files_give_equal_results(tmp_path: Path, source: Path, url: str) -> None:
    run(source, tmp_path / "a", "all")
    run(f"{url.replace('//', '//me:secret@')}/?key=secret", tmp_path / "b", "all")
    for task in TASKS:
        manifests = [json.loads((tmp_path / place / task / "manifest.json").read_text()) for place in "ab"]
        inputs, downloads = ([file.pop("source") for file in manifest["inputs"]] for manifest in manifests)
        assert all(file.pop("mtime_ns") for manifest in manifests for file in manifest["inputs"])
        assert manifests[0] == manifests[1]  # including checksums of inputs and shards
        assert downloads == [f"{url}/{task}/{Path(name).name}" for name in inputs]
    run(source, tmp_path / "b", "all")  # already prepared, from any source


@pytest.mark.parametrize("zipped", [False, True])
def test_the_source_may_be_the_directory_of_the_only_task(tmp_path: Path, source: Path, zipped: bool) -> None:
    run(source, tmp_path / "a", "conservation")
    folder = source / "conservation"
    for path in [*folder.iterdir()] if zipped else []:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    run(folder, tmp_path / "b", "conservation")
    assert rows(tmp_path / "a/conservation") == rows(tmp_path / "b/conservation")
    with pytest.raises(UserError, match=r"sequences\.fasta does not exist"):  # the task of the files is ambiguous
        run(folder, tmp_path / "c", ["conservation", "bind"])


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("\n\nMK\n>a\nMK\n", 3, "text before the first '>'"),
        (f">a TARGET=1 {TRAIN}\n>b TARGET=1 {TRAIN}\nMK\n", 1, "a record without a sequence"),
        (f">a TARGET=1 {TRAIN}\nMK\n>b TARGET=1 {TRAIN}", 3, "a record without a sequence"),
        (f">a TARGET=1 {TRAIN}\nMK\n>\nMK\n", 3, "a record without an id"),
        (f">a TARGET=1 {TRAIN}\nMK\n>a TARGET=2 {TEST}\nMK\n", 3, "a occurs twice, first at .*two_vs_rest.fasta:1:"),
        (f">a TARGET=1 {TRAIN}\nMK\nMÄ\n", 1, "non-ASCII letters"),
        (f">a TARGET=1 {TRAIN}\nMK\nMK>b TARGET=1 {TRAIN}\nMK\n", 3, "a '>' within a sequence: put a line end"),
        (">a TARGET=1\nMK\n", 1, "SET= must be train, val or test"),
        (">a TARGET=1 SET=validation VALIDATION=True\nMK\n", 1, "SET=validation must be train, val or test"),
        (">a TARGET=1 SET=train\nMK\n", 1, "VALIDATION= must be True or False"),
        (">a TARGET=1 SET=train VALIDATION=yes\nMK\n", 1, "VALIDATION=yes must be True or False"),
        (f">a {TRAIN}\nMK\n", 1, "TARGET= is missing"),
        (f">a TARGET= {TRAIN}\nMK\n", 1, "TARGET= is missing"),
        (f">a TARGET=high {TRAIN}\nMK\n", 1, "TARGET=high is not a number"),
        (f">a TARGET=nan {TRAIN}\nMK\n", 1, "TARGET=nan is not a number"),
        (f">a TARGET=1 2 {TRAIN}\nMK\n", 1, "TARGET=1 2 is not a number"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, content: str, line: int, message: str) -> None:
    source = write(tmp_path / "source", {"gb1/two_vs_rest.fasta": content})
    with pytest.raises(UserError, match=message) as error:
        run(source, tmp_path / "out", "gb1")
    assert str(error.value).startswith(f"{source}/gb1/two_vs_rest.fasta:{line}: ") and "\n" not in str(error.value)
    assert not (tmp_path / "out/gb1").exists()


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        (
            "secondary_structure",
            "sampled.fasta",
            LABELS.replace("HcE", "Hc"),
            ":3: 1abc-A has 2 letters, but 3 in seq",
        ),
        ("secondary_structure", "resolved.fasta", RESOLVED + "1", ":5: 3abc-C has 3 letters, but 2 in sequences"),
        (
            "secondary_structure",
            "resolved.fasta",
            RESOLVED.partition(">3")[0],
            "sampled.fasta:1: 3abc-C is not in resolved.fasta",
        ),
        ("secondary_structure", "resolved.fasta", RESOLVED + ">d\n1\n", "resolved.fasta:7: d is not in sequences"),
        ("conservation", "sampled.fasta", LABELS + f">d {TEST}\nH\n", "sampled.fasta:7: d is not in sequences.fasta"),
        ("conservation", "sequences.fasta", RESIDUES + ">d\nM\n", "sequences.fasta:8: d is not in sampled.fasta"),
        ("bind", "from_publication.fasta", LABELS + f">d {TEST}\nH\n", ":7: d is not in sequences.fasta"),
        ("bind", "from_publication.fasta", "\n\n", "from_publication.fasta contains no records"),
    ],
)
def test_files_must_match(tmp_path: Path, source: Path, task: str, name: str, content: str, message: str) -> None:
    write(source / task, {name: content})
    with pytest.raises(UserError, match=message):
        run(source, tmp_path / "out", task)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("secondary_structur", "did you mean secondary_structure"),
        (["gb1", "xyz"], "task_name=xyz .*: choose .*aav, bind, .*secondary_structure"),
        ([], "choose aav, bind"),
    ],
)
def test_unknown_tasks_are_reported_first(tmp_path: Path, source: Path, task: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(source, tmp_path / "out", task)
    assert not (tmp_path / "out").exists()


def test_shared_flip_sample(tmp_path: Path) -> None:
    source = ROOT.parent / "shared/data/flip"
    if not source.exists():
        pytest.skip("no shared data")
    run(source, tmp_path, "secondary_structure")
    found = rows(tmp_path / "secondary_structure")
    assert sum(len(split) - 1 for split in found.values()) == 975
    for split in found.values():
        for _, sequence, labels, resolved in split[1:]:
            assert len(sequence) == len(labels) == len(resolved)
            assert set(labels) <= set("HEC") and set(resolved) <= set("01")
