# SPDX-License-Identifier: Apache-2.0
"""Predictions by several processes, and after processes were killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bionemo.inference import predict_files as running
from tests.conftest import EXAMPLES, ROOT
from tests.inference.samples import ALL, command, go, parts_of_150_letters, same, sequences


@pytest.mark.slow
def test_any_number_of_processes_writes_an_equal_file(model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "one.npz", ALL)
    done = subprocess.run(
        command(model, fasta, tmp_path / "two.npz", "trainer.devices=2"), cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"10 sequences: {tmp_path / 'two.npz'}\n"), done.stderr
    assert same(tmp_path / "one.npz", tmp_path / "two.npz")


def test_a_killed_prediction_is_resumed(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction is killed in its third part; the first two are not recomputed."""
    computed: list[int] = []
    stopped: list[int] = []
    compute = running._compute_part

    def stop(prediction: Any, number: int, *rest: Any) -> None:
        if number == 2 and not stopped:
            stopped.append(number)
            raise SystemError
        computed.append(number)
        compute(prediction, number, *rest)

    monkeypatch.setattr(running, "_compute_part", stop)
    with pytest.raises(SystemError):
        go(model, fasta, tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()
    go(model, fasta, tmp_path / "x.npz", "model.data.batch_size=1")
    assert computed == sorted(set(computed))
    go(model, fasta, tmp_path / "whole.npz")
    assert same(tmp_path / "x.npz", tmp_path / "whole.npz")
    assert not (tmp_path / "x.npz.parts").exists()


def test_parts_of_another_prediction_are_not_reused(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "merge_parts", lambda prediction: [])
    monkeypatch.setattr("bionemo.cli.predict.print", lambda *arguments: None, raising=False)
    go(model, fasta, tmp_path / "x.npz")
    assert len(list((tmp_path / "x.npz.parts").glob("part-*"))) > 2
    monkeypatch.undo()
    parts_of_150_letters(monkeypatch)
    fasta.write_text(">a\nMKT\n")
    go(model, fasta, tmp_path / "x.npz")
    assert "holds parts of another prediction: they are removed" in capsys.readouterr().err
    assert np.load(tmp_path / "x.npz")["id"].tolist() == ["a"]


@pytest.mark.slow
def test_a_killed_process_ends_all_processes(model: Path, fasta: Path, tmp_path: Path) -> None:
    """The second of two processes is killed as soon as it starts."""
    fasta.write_text("".join(f">{n}\n{text}\n" for n, text in enumerate(sequences((90,) * 4000))))
    process = subprocess.Popen(
        command(model, fasta, tmp_path / "x.npz", "trainer.devices=2"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 600
        while not (child := _child(process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert child
        os.kill(child, signal.SIGKILL)
        _, output = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 1
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: rank 1 (process {child}) was killed by SIGKILL: check the memory of this machine"]


@pytest.mark.slow
def test_the_process_with_an_invalid_sequence_names_it(model: Path, tmp_path: Path) -> None:
    """The second of two processes computes the second part; the first process has no error of its own."""
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">a\n{'MK' * 65_500}\n>b\n{'1' * 100}\n")
    overrides = ("trainer.devices=2", "model.data.long_sequences=truncate")
    done = subprocess.run(
        command(model, fasta, tmp_path / "x.npz", *overrides), cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    message = r"b \(record 1\) contains no letter of the vocabulary \('1{30}'\): check that it is a sequence"
    assert len(errors) == 1
    assert re.fullmatch(rf"error: rank 1 \(process \d+\): {message}", errors[0])
    assert "Traceback" not in done.stderr


FAILING_WORKER = """\
import os
import bionemo.inference.load
from bionemo.cli.predict import main
from bionemo.common.errors import UserError

def fail(*_):
    raise UserError("the second device has no memory")

if os.environ.get("RANK") == "1":
    bionemo.inference.load.load = fail
main()
"""


@pytest.mark.slow
def test_a_worker_that_cannot_load_the_model_prints_its_error(model: Path, tmp_path: Path) -> None:
    """The only error line is that of the worker for the second part."""
    (tmp_path / "main.py").write_text(FAILING_WORKER)
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">a\n{'MK' * 65_500}\n>b\n{'M' * 100}\n")
    more = ("trainer.devices=2", "model.data.long_sequences=truncate")
    arguments = command(model, fasta, tmp_path / "x.npz", *more)[3:]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py"), *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.fullmatch(r"error: rank 1 \(process \d+\): the second device has no memory", errors[0])
    assert not (tmp_path / "x.npz").exists()


def _child(pid: int) -> int | None:
    """Find a child process of this process that runs the same program."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = file.read_text().rsplit(")", 1)[1].split()
            if int(state[1]) == pid and b"bionemo.predict" in (file.parent / "cmdline").read_bytes():
                return int(file.parent.name)
        except OSError:
            continue
    return None


def test_the_v1_command(model: Path, fasta: Path, tmp_path: Path) -> None:
    """v1's command line, with its own overrides."""
    arguments = ["--config-dir", str(EXAMPLES / "esm2nv" / "conf"), "--config-name", "infer.yaml",
             f"++model.downstream_task.restore_from_path={model}", f"++model.data.dataset_path={fasta}",
             f"++model.data.output_fname={tmp_path}/x.pkl", "++model.data.long_sequences=truncate"]  # fmt: skip
    line = [sys.executable, "-m", "bionemo.model.infer", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"10 sequences: {tmp_path}/x.pkl" in done.stdout
