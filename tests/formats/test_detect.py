# SPDX-License-Identifier: Apache-2.0
"""What is no model, or one of another program, is named with what to do, by every command, without unpickling."""

import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bionemo
from bionemo.checkpoint.manifest import format_manifest, load_manifest
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, describe
from bionemo.formats.detect import detect_format, locate_model
from bionemo.inference.load import open_saved_model
from bionemo.training.resume import find_resume_checkpoint, open_initial_weights
from tests.conftest import checkpoint_command
from tests.formats.archives import MARK
from tests.support.runs import config, last_checkpoint, read_weights, train


class Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def unpacked_nemo(path: Path) -> None:
    path.mkdir()
    (path / "model_config.yaml").write_text("{}")
    (path / "model_weights.ckpt").write_bytes(b"x")


def distributed(path: Path) -> None:
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(b"x")


KINDS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "torch": ("x.bin", lambda path: torch.save({}, path), "is a file of torch.save or pickle, which"),
    "pickle": (
        "x.pkl", lambda path: path.write_bytes(pickle.dumps(Exploit(path.parent.parent / MARK))),
        "is a file of torch.save or pickle, which can run code when it is read: save the model as a directory with",
    ),
    "safetensors": (
        "x.safetensors", lambda path: save_file({"a": torch.ones(1)}, path),
        "is a safetensors file without its config.json: put both into one directory, the file as model.safetensors",
    ),
    "adapters": (
        "adapter_model.safetensors", lambda path: save_file({"a": torch.ones(1)}, path),
        "is a file of an adapter of peft: give its directory, which has adapter_config.json, too",
    ),
    "head": (
        "head.safetensors", lambda path: save_file({"a": torch.ones(1)}, path),
        "is the head of a fine-tuning run: bionemo analysis label --head",
    ),
    "pointer": (
        "x.safetensors", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a pointer of Git LFS instead of the file: run git lfs pull",
    ),
    "text": ("x.fasta", lambda path: path.write_text(">a\nMKT\n"), "is not a checkpoint, a .nemo archive, a"),
    "fifo": ("x", os.mkfifo, "cannot be read: it is not a regular file"),
    "nothing": ("x", lambda path: None, ": there is no such checkpoint, .nemo archive, Hugging Face directory or"),
    "empty": ("x", Path.mkdir, "is not a checkpoint, a .nemo archive, a Hugging Face directory or a .pt file of"),
    "weights of bionemo 2": (
        "weights", distributed, "holds the weights of a distributed checkpoint without their architecture: give the "
        "directory that contains context/io.json and weights/, as NeMo 2 and BioNeMo 2 write it",
    ),
    "unpacked": ("x", unpacked_nemo, "is an unpacked .nemo archive: pack it with tar -cf NAME.nemo -C"),
    "unpacked with suffix": ("x.nemo", unpacked_nemo, "is an unpacked .nemo archive: pack it with tar -cf NAME.nemo"),
}  # fmt: skip


@pytest.mark.usefixtures("sentinel")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message of the function that recognizes formats is that of every way to open a model."""
    (tmp_path / "files").mkdir()
    name, write, message = KINDS[kind]
    path = tmp_path / "files" / name
    write(path)
    with pytest.raises(UserError) as caught:
        detect_format(path)
    text = str(caught.value)
    assert text.startswith(f"{path}")
    assert message in text
    assert text.isprintable()
    assert not any(wrong in text for wrong in ("remove", "needs no conversion"))
    for use in (bionemo.load, open_saved_model, describe, open_initial_weights,
                lambda path: convert(Path(path), tmp_path / "ours")):  # fmt: skip
        with pytest.raises(UserError) as again:
            use(path if use is describe else str(path))
        assert str(again.value) == text
    for command in (["inspect", path], ["verify", path], ["average", tmp_path / "z", path, path]):
        assert checkpoint_command(monkeypatch, *command) == 1
        assert capsys.readouterr().err == f"error: {text}\n"
    cfg = config(tmp_path / "run", f"exp_manager.resume_from_checkpoint={path}")
    with pytest.raises(UserError) as again:
        find_resume_checkpoint(cfg, tmp_path, tmp_path)
    assert str(again.value) == text


def test_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory of a run, or of its checkpoints, is its newest checkpoint; a directory of runs names one."""
    train(config(tmp_path / "name" / "run"))
    newest = last_checkpoint(tmp_path / "name" / "run")
    expected = read_weights(newest)
    for number, path in enumerate((newest.parent.parent, newest.parent)):
        assert bionemo.load(path).path == newest
        assert open_initial_weights(str(path)).path == newest
        convert(path, tmp_path / f"{number}.nemo")
        convert(tmp_path / f"{number}.nemo", tmp_path / str(number))
        found = read_weights(tmp_path / str(number))
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        with pytest.raises(UserError, match=f"is the directory of a run: name one of its checkpoints, .* {newest}$"):
            find_resume_checkpoint(
                config(tmp_path / "b", f"exp_manager.resume_from_checkpoint={path}"), tmp_path, tmp_path
            )
    saved = sorted(each for each in newest.parent.iterdir() if each.is_dir())
    capsys.readouterr()
    checkpoint_command(monkeypatch, "verify", f"model={newest.parent.parent}")
    assert capsys.readouterr().out == "".join(f"{each}: valid\n" for each in saved)
    checkpoint_command(monkeypatch, "average", tmp_path / "mean", newest.parent.parent, newest)
    mean = read_weights(tmp_path / "mean")
    assert all(torch.equal(mean[name], values) for name, values in expected.items())
    for path in (tmp_path / "name", tmp_path):
        with pytest.raises(UserError, match=f"not the directory of one run: .* such as {newest.parent.parent}$"):
            bionemo.load(path)
    with pytest.raises(UserError, match=r"tensors-0.safetensors is one file of a model: give its directory, .*-last$"):
        bionemo.load(newest / "tensors-0.safetensors")
    for path in (newest.parent).iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match="is the directory of a run that has no complete checkpoint: give"):
        bionemo.load(newest.parent.parent)
    with pytest.raises(UserError, match=r"manifest\.json is missing"):  # a damaged checkpoint remains one
        bionemo.load(newest)


def rewrite(path: Path, **values: object) -> None:
    """Change entries of the manifest of a checkpoint."""
    manifest = load_manifest(path) | values
    (path / "manifest.json").write_text(format_manifest(manifest))


def test_best_checkpoint_of_a_run(tmp_path: Path) -> None:
    """RUN:best has the best metric among the last kind of validation, whatever its mode, and is no NAME-last."""
    run, best = tmp_path / "run", f"{tmp_path}/run:best"
    keep = "exp_manager.checkpoint_callback_params.save_top_k=-1"
    train(config(run, keep, "trainer.max_steps=3", "trainer.val_check_interval=1"))
    steps = {load_manifest(path)["step"]: path for path in (run / "checkpoints").glob("*[!t]") if path.is_dir()}
    assert [*sorted(steps)] == [1, 2, 3]
    name, newest = "val_loss", locate_model(run)
    kind = load_manifest(newest)["validation"]
    for path, loss in zip([*(steps[step] for step in (1, 2, 3)), newest], [3.0, 1.0, 2.0, 2.0], strict=True):
        rewrite(path, metrics={name: loss})
    assert bionemo.load(best).path == locate_model(Path(best)) == steps[2]
    assert open_initial_weights(best).path == steps[2]
    assert locate_model(tmp_path / "run" / "checkpoints:best") == steps[2]
    convert(Path(best), tmp_path / "best.nemo")
    with pytest.raises(UserError, match=f"is the directory of a run: name one of its checkpoints, .* {steps[2]}$"):
        find_resume_checkpoint(
            config(tmp_path / "b", f"exp_manager.resume_from_checkpoint={best}"), tmp_path, tmp_path
        )
    rewrite(steps[1], metrics={name: 0.5}, validation=f"another {kind}")
    assert locate_model(Path(best)) == steps[2]
    rewrite(steps[2], metrics={name: math.nan})
    assert locate_model(Path(best)) == steps[3]
    for path in (*steps.values(), newest):
        rewrite(path, validation=kind.replace(" min", " max"), metrics={name: 3.0 - load_manifest(path)["step"]})
    assert locate_model(Path(best)) == steps[1]
    for path in (*steps.values(), newest):
        rewrite(path, metrics={})
    with pytest.raises(UserError, match=f"{run} has no checkpoint with the metric of a validation: give {run}, its"):
        locate_model(Path(best))
    with pytest.raises(UserError, match="absent: there is no such checkpoint"):
        locate_model(Path("absent:best"))


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "esm2_t6_8M_UR50D.pt")
    with pytest.raises(UserError, match=r"its esm2_t6_8M_UR50D\.pt is a file of torch.save.*: if fair-esm wrote it"):
        bionemo.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "esm"}))
    with pytest.raises(UserError, match=r"vocab.txt is one file of a model: give its directory"):
        (tmp_path / "vocab.txt").write_text("A")
        bionemo.load(tmp_path / "vocab.txt")
