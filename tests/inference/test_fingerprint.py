# SPDX-License-Identifier: Apache-2.0
"""Parts are reused only by the same prediction, and files of other origin are not touched."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bionemo
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import InferConfig
from bionemo.inference import predict_files as running
from bionemo.inference.fingerprint import prediction_fingerprint
from bionemo.inference.input_records import Records
from bionemo.inference.part_files import COMPLETE
from tests.inference.samples import go, sequences

READER = "model.data.data_impl_kwargs.csv_fields_mmap"
CSV = ["model.data.data_impl=csv_fields_mmap"]


def stopped(monkeypatch: pytest.MonkeyPatch, *given: Any) -> None:
    """Run a prediction that computes all parts and is stopped before it assembles them."""

    def stop(prediction: object) -> None:
        raise SystemError

    with monkeypatch.context() as patch:
        patch.setattr(running, "merge_parts", stop)
        with pytest.raises(SystemError):
            go(*given)


def test_parts_of_other_columns_are_not_reused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The column is corrected after a start with the wrong one."""
    rows = [(text, text[::-1] + "A") for text in sequences((10, 20, 30, 40, 50))]
    data, output = tmp_path / "x.csv", tmp_path / "x.npz"
    data.write_text("id,a,b\n" + "".join(f"{n},{a},{b}\n" for n, (a, b) in enumerate(rows)))
    stopped(monkeypatch, model, data, output, *CSV, f"{READER}.data_fields={{id: 0, sequence: 1}}")
    assert list((tmp_path / "x.npz.parts").glob("part-*"))
    go(model, data, output, *CSV, f"{READER}.data_fields={{id: 0, sequence: 2}}")
    assert "holds parts of another prediction: they are removed (other settings)" in capsys.readouterr().err
    assert np.array_equal(np.load(output)["embeddings"], bionemo.load(model).embed([b for _, b in rows]))
    assert not (tmp_path / "x.npz.parts").exists()


def _same_state(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file without changing its size and modification time."""
    state, before = path.stat(), path.read_bytes()
    path.write_bytes(change(before))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == len(before)


SAME = ["trainer.accelerator=cpu", "trainer.devices=3", "model.data.batch_size=1", "model.data.tokens_per_batch=9",
        "model.data.output_fname=y.h5", "model.data.overwrite=True", f"{READER}.workers=3", "name=x"]  # fmt: skip
OTHER = ["model.downstream_task.outputs=[begin]", "trainer.precision=bf16-mixed", "model.data.long_sequences=drop",
         f"{READER}.data_sep=' '", f"{READER}.header_lines=2", f"{READER}.newline_int=13",
         f"{READER}.sort_dataset_paths=True", f"{READER}.data_fields={{sequence: 2}}",
         "model.data.data_fields_map.sequence=seq", "model.data.data_impl=fasta_fields_mmap",
         "model.downstream_task.sampling.seed=1", "model.downstream_task.reconstruction_beam_size=2"]  # fmt: skip


def test_changes_of_the_result_change_the_fingerprint(model: Path, fasta: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model, path)

    def identity(*overrides: str) -> dict[str, Any]:
        given = [f"model.downstream_task.restore_from_path={path}", f"model.data.dataset_path={fasta}"]
        cfg = load("predict", [*given, *overrides], schema=InferConfig)
        paths = Records(replace(cfg.model.data, data_impl="")).paths
        return prediction_fingerprint(
            cfg.model.downstream_task, cfg.model.data, str(cfg.trainer.precision), paths, bionemo.load(path, "cpu")
        )

    before = identity()
    assert all(identity(word) == before for word in SAME)
    for word in OTHER:
        assert identity(word)["settings"] != before["settings"], word
    _same_state(fasta, lambda text: text.replace(b"M", b"A"))
    assert [key for key, value in identity().items() if value != before[key]] == ["input"]
    (weights,) = path.glob("*.safetensors")
    shutil.copy(weights, tmp_path / "copy")  # at another time
    (tmp_path / "copy").replace(weights)
    assert identity()["model"] == before["model"]
    _same_state(weights, lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    assert [key for key, value in identity().items() if value != before[key]] == ["model", "input"]


def test_a_damaged_part_is_recomputed(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(model, fasta, tmp_path / "whole.npz")
    stopped(monkeypatch, model, fasta, tmp_path / "x.npz")
    one, two, *_ = sorted((tmp_path / "x.npz.parts").glob("part-*"))
    one.write_bytes(one.read_bytes()[:-8])
    two.write_bytes(two.read_bytes()[:20] + b"\0" * 8 + two.read_bytes()[28:])
    go(model, fasta, tmp_path / "x.npz")
    whole, found = np.load(tmp_path / "whole.npz"), np.load(tmp_path / "x.npz")
    assert all(np.array_equal(whole[key], found[key]) for key in whole.files)


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_user_files_with_the_name_of_the_parts_are_kept(what: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    place, mine = tmp_path / "x.npz.parts", tmp_path / "mine"
    match what:
        case "directory":
            place.mkdir()
            (place / "identity").write_text("mine")
        case "file":
            place.write_text("mine")
        case "link":
            mine.mkdir()
            (mine / "identity").write_text("mine")
            place.symlink_to(mine)
    with pytest.raises(UserError, match=r"x.npz.parts exists and was not created by bionemo: move it away"):
        go(model, fasta, tmp_path / "x.npz")
    assert (place if what == "file" else place / "identity").read_text() == "mine"
    assert not (tmp_path / "x.npz").exists()


def test_an_output_created_by_another_process_is_kept(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.npz"
    finish = running.merge_parts

    def late(prediction: Any) -> list[str]:
        output.write_text("mine")
        return finish(prediction)

    with monkeypatch.context() as patch:
        patch.setattr(running, "merge_parts", late)
        with pytest.raises(UserError, match=r"x.npz exists: choose another"):
            go(model, fasta, output)
    assert output.read_text() == "mine"
    assert list((tmp_path / "x.npz.parts").glob("part-*"))
    with pytest.raises(UserError, match=r"is a directory: set model\.data\.output_fname"):
        go(model, fasta, tmp_path, "model.data.overwrite=True", "model.data.output_format=npz")


def test_interruption_between_output_and_deletion_of_the_parts(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start recognizes its own output and deletes the parts; it rejects another file of that name."""
    output, directory = tmp_path / "x.npz", tmp_path / "x.npz.parts"

    def stop(*_: object) -> None:
        raise SystemError

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(SystemError):
            patch.setattr(running, "remove_owned", stop)
            go(model, fasta, output)
        assert output.exists() and list(directory.glob("part-*"))
    whole = output.read_bytes()
    output.unlink()
    output.write_bytes(whole)  # a copy is a different file
    with pytest.raises(UserError, match=r"x\.npz exists: choose another"):
        go(model, fasta, output)
    output.unlink()
    os.link(directory / COMPLETE, output)
    go(model, fasta, output)
    assert output.read_bytes() == whole
    assert not directory.exists()


def test_each_file_has_its_own_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may differ in column order, separator, and presence of names."""
    texts = sequences((10, 20, 30, 40))
    (tmp_path / "a.csv").write_text(f"id,sequence\np0,{texts[0]}\n")
    (tmp_path / "b.csv").write_text(f"sequence,note,id\n{texts[1]},ACD,p1\n")
    (tmp_path / "c.tsv").write_text(f"note\tsequence\nACD\t{texts[2]}\n")
    (tmp_path / "d.csv").write_text(f"id,sequence\np3,{texts[3]}\n")
    monkeypatch.chdir(tmp_path)
    given = ["model.downstream_task.restore_from_path=x", "model.data.dataset_path=[a.csv,b.csv,c.tsv,d.csv]"]
    records = Records(load("predict", given, schema=InferConfig).model.data)
    assert [(each.id, each.text) for each in records.read(0, 4)] == list(
        zip(["p0", "p1", "2", "p3"], texts, strict=True)
    )
    assert records.lengths.tolist() == [10, 20, 30, 40]
    assert [each.id for each in records.read(1, 2)] == ["p1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{READER}.data_fields={{id: 0, sequence: 1}}"], "x.csv: column 1 is 'organism', and the sequences are in "
         "column 2, 'sequence': set model.data.data_impl_kwargs.csv_fields_mmap.data_fields.sequence=2"),
        ([f"{READER}.data_fields={{id: 0, sequence: 7}}"], "x.csv: column 7 is missing, and the sequences are in "),
        ([f"{READER}.data_fields={{id: 0, seq: 2}}", f"~{READER}.data_fields.sequence"], "has no field 'sequence'"),
    ],
)  # fmt: skip
def test_column_numbers_that_contradict_the_header(
    overrides: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("id,organism,sequence\na,MKT,ACD\n")
    with pytest.raises(UserError, match=message):
        go(model, tmp_path / "x.csv", tmp_path / "x.npz", *CSV, *overrides)
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_configured_column_names_take_precedence_over_the_header(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,sequence,mutated\na,MKT,ACD\n")
    given = ["model.downstream_task.restore_from_path=x", f"model.data.dataset_path={tmp_path}/x.csv", *CSV,
             f"{READER}.data_fields.sequence=2", "model.data.data_fields_map.sequence=mutated"]  # fmt: skip
    records = Records(load("predict", given, schema=InferConfig).model.data)
    assert [each.text for each in records.read(0, 1)] == ["ACD"]
