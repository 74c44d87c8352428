# SPDX-License-Identifier: Apache-2.0
"""A complete data set is not accepted for other inputs."""

import gzip
import json
import logging
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bionemo.cli import preprocess
from bionemo.common.errors import UserError
from bionemo.preparation import manifest, sequences
from bionemo.preparation.manifest import checksum_file
from bionemo.preparation.zinc import prepare as prepare_zinc
from tests.support.preparation import make_job, prepare, shards
from tests.support.preparation_uniref import prepare as prepare_clusters
from tests.support.preparation_zinc import job as zinc_job

SIZES = {"val_size": 1, "test_size": 1, "num_csv_files": 1}


def write(path: Path, letters: str = "MKV") -> Path:
    path.write_text("".join(f">p{number}\n{letters}\n" for number in range(6)))
    return path


def test_another_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(write(tmp_path / "a.fasta"), out, **SIZES)
    made = shards(out)
    with pytest.raises(UserError, match=r"was prepared from .*a\.fasta, not .*b\.fasta: choose another output"):
        prepare(write(tmp_path / "b.fasta"), out, **SIZES)
    write(tmp_path / "a.fasta", "MKVL")
    with pytest.raises(UserError, match=r"a\.fasta has changed since"):
        prepare(tmp_path / "a.fasta", out, **SIZES)
    assert shards(out) == made
    prepare(tmp_path / "a.fasta", out, force=True, **SIZES)
    assert shards(out) != made


def test_letters_are_counted(tmp_path: Path) -> None:
    manifest = prepare(write(tmp_path / "a.fasta"), tmp_path / "out", **SIZES)
    assert manifest.tallies["a.fasta"].letters_read == manifest.tallies["a.fasta"].letters_written == 18


def test_letters_of_dropped_records(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\nMK*\n>b\nMKVL\n>a\nMKVLA\n>c\nM\n>d\nMM\n")
    changes = {"on_duplicate": "skip", "on_letters": "strip", **SIZES}
    tally = prepare(tmp_path / "a.fasta", tmp_path / "out", **changes).tallies["a.fasta"]
    assert (tally.letters_read, tally.letters_written, tally.letters_dropped) == (15, 9, 6)


def test_lines_that_end_in_cr_alone(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\rMK\r>b\rMK\r")
    with pytest.raises(UserError, match=r"a\.fasta:1: lines end in CR alone"):
        prepare(tmp_path / "a.fasta", tmp_path / "out", **SIZES)


def test_a_gzipped_mapping(tmp_path: Path) -> None:
    write(tmp_path / "uniref50_train_filt.fasta")
    write(tmp_path / "uniref50_valid.fasta")
    (tmp_path / "uniref90membersandreps_ur50trainfiltreps.fasta").write_text(
        "".join(f">m{number}\nMKV\n" for number in range(6))
    )
    text = "cluster\tmembers\n" + "".join(f"p{number}\tm{number}\n" for number in range(6))
    (tmp_path / "mapping.tsv").write_bytes(gzip.compress(text.encode()))
    tallies = prepare_clusters(tmp_path, tmp_path / "out").tallies
    assert tallies["uniref50_train_filt.fasta"].written == 6


def changed(path: Path) -> Path:
    """Replace a file by one of equal size."""
    before = path.stat()
    path.write_text(path.read_text().replace("MKV", "MKL", 1))
    assert path.stat().st_size == before.st_size
    return path


def test_a_changed_input_of_equal_size_is_noticed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.fasta"), tmp_path / "out"
    prepare(source, out, **SIZES)
    made = shards(out)
    changed(source)
    with pytest.raises(UserError, match=r"a\.fasta has changed since .* choose another output, or set force=True"):
        prepare(source, out, **SIZES)
    assert shards(out) == made
    prepare(source, out, force=True, **SIZES)
    prepare(source, out, **SIZES)


def test_an_input_of_equal_size_and_time_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "a.fasta"), tmp_path / "out"
    prepare(source, out, **SIZES)
    through: list[Path] = []
    monkeypatch.setattr(manifest, "checksum_file", lambda path, *_: through.append(path) or checksum_file(path))
    sequences.prepare(make_job(source, out, **SIZES))
    assert not through
    source.touch()
    sequences.prepare(make_job(source, out, **SIZES))
    assert through == [source]


def test_a_copied_or_missing_input_counts_as_unchanged(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.fasta"), tmp_path / "out"
    prepare(source, out, **SIZES)
    made = shards(out)
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copy(source, tmp_path / "b"))
    prepare(copy, out, **SIZES)
    source.unlink()
    prepare(source, out, **SIZES)
    with pytest.raises(UserError, match=r"has changed since .*, or is another file"):
        prepare(changed(copy), out, **SIZES)
    assert shards(out) == made


def test_more_fewer_or_reordered_inputs(tmp_path: Path) -> None:
    a, b, out = write(tmp_path / "a.fasta"), tmp_path / "b.fasta", tmp_path / "out"
    b.write_text(a.read_text().replace(">p", ">q"))
    prepare([a, b], out, **SIZES)
    for other, message in (
        ([a], "from 2 files, not 1"),
        ([a, b, a], "from 2 files, not 3"),
        ([b, a], r"from .*a\.fasta, not .*b\."),
    ):
        with pytest.raises(UserError, match=f"was prepared {message}"):
            prepare(other, out, **SIZES)
    prepare([a, b], out, **SIZES)


def test_urls_are_compared_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(write(tmp_path / "a.fasta"), out, **SIZES)
    path = out / "manifest.json"
    path.write_text(path.read_text().replace(f"{tmp_path}/a.fasta", "https://host/2021/a.fasta"))
    prepare("https://me:secret@host/2021/a.fasta?key=1", out, **SIZES)
    with pytest.raises(UserError, match=r"from https://host/2021/a\.fasta, not https://host/2024/a\.fasta: "):
        prepare("https://me:secret@host/2024/a.fasta?key=1", out, **SIZES)


def prepare_molecules(source: Path, output: Path, **sizes: int) -> None:
    prepare_zinc(zinc_job(source, output, **sizes))


def test_molecules_from_another_source(tmp_path: Path) -> None:
    for name in ("a.smi", "b.smi"):
        (tmp_path / name).write_text("".join(f"{'C' * (size + 1)} {name}{size}\n" for size in range(30)))
    sizes = {"train_size": 10, "val_size": 10, "test_size": 10}
    prepare_molecules(tmp_path / "a.smi", tmp_path / "out", **sizes)
    prepare_molecules(tmp_path / "a.smi", tmp_path / "out", **sizes)
    with pytest.raises(UserError, match=r"was prepared from .*a\.smi, not .*b\.smi"):
        prepare_molecules(tmp_path / "b.smi", tmp_path / "out", **sizes)
    (tmp_path / "a.smi").write_text((tmp_path / "a.smi").read_text().replace("C ", "N ", 1))
    with pytest.raises(UserError, match=r"a\.smi has changed since"):
        prepare_molecules(tmp_path / "a.smi", tmp_path / "out", **sizes)


def test_clusters_from_another_table(tmp_path: Path) -> None:
    write(tmp_path / "uniref50_train_filt.fasta")
    write(tmp_path / "uniref50_valid.fasta")
    (tmp_path / "uniref90membersandreps_ur50trainfiltreps.fasta").write_text(
        "".join(f">m{number}\nMKV\n" for number in range(6))
    )
    text = "cluster\tmembers\n" + "".join(f"p{number}\tm{number}\n" for number in range(6))
    (tmp_path / "mapping.tsv").write_text(text)
    prepare_clusters(tmp_path, tmp_path / "out")
    prepare_clusters(tmp_path, tmp_path / "out")
    (tmp_path / "mapping.tsv").write_text(text.replace("p0\tm0", "p0\tm1").replace("p1\tm1", "p1\tm0"))
    with pytest.raises(UserError, match=r"mapping\.tsv has changed since"):
        prepare_clusters(tmp_path, tmp_path / "out")


def test_dropped_columns_and_records_per_split_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bionemo.preparation")
    lines = "".join(f"p{number},MKV,{number % 2},x\n" for number in range(50))
    (tmp_path / "a.csv").write_text(f"id,sequence,label,origin\n{lines}")
    prepare(tmp_path / "a.csv", tmp_path / "out", val_size=5, test_size=0.04)
    assert (
        caplog.text.count("a.csv: dropped columns: label, origin; the shards contain only id, sequence; to train") == 1
    )
    assert f"prepared: {tmp_path / 'out'}: train 43, val 5, test 2 records" in caplog.messages
    assert "note: test has 2 of 50 records, too few for reliable metrics: set larger" in caplog.text
    caplog.clear()
    prepare(write(tmp_path / "a.fasta"), tmp_path / "b", val_size=1, test_size=1)  # the requested sizes
    assert "note: " not in caplog.text


def test_few_molecules_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bionemo.preparation")
    text = "".join(f"{'C' * (size + 1)},z{size},{size}\n" for size in range(328))
    (tmp_path / "a.csv").write_text(f"smiles,zinc_id,logp\n{text}")
    sizes = {"train_size": 10_050_000, "val_size": 100, "test_size": 50_000}
    prepare_molecules(tmp_path / "a.csv", tmp_path / "out", **sizes)
    assert "a.csv: dropped columns: logp;" in caplog.text
    message = "val has 1 and test has 1 of 328 records, too few for reliable metrics: set larger val_size and "
    message += "test_size in proportion to train_size, and force=True"
    assert message in caplog.text
    assert f"prepared: {tmp_path / 'out'}: train 326, val 1, test 1 records" in caplog.messages


def test_libraries_that_decide_the_content(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their versions are in the manifest; others are noted when the data set is used or verified."""
    (tmp_path / "a.smi").write_text("".join(f"{'C' * n}O\n" for n in range(1, 30)))
    out = tmp_path / "out"
    prepare_zinc(zinc_job(tmp_path / "a.smi", out))
    path, installed = out / "manifest.json", metadata.version("rdkit")
    assert json.loads(path.read_text())["versions"] == {"rdkit": installed}
    monkeypatch.setattr(sys, "argv", ["bionemo", "--verify", str(out)])
    caplog.set_level(logging.INFO)

    def notes() -> list[str]:
        caplog.clear()
        prepare_zinc(zinc_job(tmp_path / "a.smi", out))
        preprocess.main()
        return [text for text in [*caplog.messages, *capsys.readouterr().out.splitlines()] if "note: " in text]

    assert notes() == []
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"versions": {"rdkit": "2024.3.1"}}))
    note = f"note: {out} was prepared with rdkit 2024.3.1, and {installed} is installed: the content may differ"
    assert [text.startswith(note) for text in notes()] == [True, True]
    assert prepare(write(tmp_path / "a.fasta"), tmp_path / "proteins", **SIZES).versions == {
        "numpy": metadata.version("numpy")
    }
