# SPDX-License-Identifier: Apache-2.0
"""`bionemo report`: curves, and pages of complete, resumed, damaged and several runs."""

import json
import platform
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from bionemo.cli import report as command
from bionemo.common.cpu import read_cpu_fields
from bionemo.common.errors import UserError
from bionemo.common.version import __version__
from bionemo.evaluation.html import html_page, write_page
from bionemo.evaluation.run_report import RunReport, downsample, open_runs, render_runs
from tests.support.runs import config, run, train

pytest.importorskip("bokeh")
SECRET = "hf_" + "Zx9Qw3Er7Ty1Ui5Op2As4Df6Gh8Jk0Lz"


def write_events(directory: Path, values: dict[str, list[float]], first: int = 10) -> Path:
    """Write values of every tenth step, as TensorBoard does."""
    writer = EventFileWriter(str(directory))
    for number in range(max(map(len, values.values()))):
        for tag, series in values.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=series[number])])
            writer.add_event(Event(wall_time=1.7e9 + number, step=first + 10 * number, summary=summary))
    writer.close()
    return max(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)


def test_of_a_step_that_was_trained_again_the_last_value_is_kept(tmp_path: Path) -> None:
    """A file of TensorBoard for each start; the second starts at step 20 again, and its last record is incomplete."""
    write_events(tmp_path, {"lr": [1.0, 2.0, 3.0]}).rename(tmp_path / "events.out.tfevents.1.host.1.0")
    path = write_events(tmp_path, {"lr": [8.0, 16.0, 32.0], "val_loss": [3.0, float("nan"), 2.0]}, first=20)
    path.write_bytes(path.read_bytes()[:-1])
    (run,) = open_runs([tmp_path])
    steps, values = run.curves["lr"]
    assert (steps.tolist(), values.tolist()) == ([10, 20, 30, 40], [1, 8, 16, 32])
    assert run.curves["val_loss"][0].tolist() == [20, 30]


def test_downsampling_keeps_spikes() -> None:
    values = np.array([1.0 + 0.1 * (number % 7) for number in range(10_000)])
    values[4_321], values[7_654], values[9_000] = 99.0, -99.0, float("nan")
    steps, found = downsample(np.arange(10_000), values, 100)
    assert len(found) <= 200
    assert {4_321, 7_654, 9_000} <= set(steps.tolist())
    assert (np.diff(steps) > 0).all()
    np.testing.assert_array_equal(found, values[steps])
    steps, _ = downsample(np.arange(8), np.array([5.0, 1, 9, 4, 4, 8, 2, 3]), 2)
    assert steps.tolist() == [1, 2, 5, 6]  # extremes of the halves
    assert downsample(np.arange(3), np.array([1.0, 2, 3]), 100)[0].tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run that was interrupted and resumed, and a run with another learning rate."""
    directory = tmp_path_factory.mktemp("runs")
    common = ["trainer.max_steps=6", "trainer.val_check_interval=2"]
    for limit in ("trainer.max_steps=4", "trainer.max_steps=6"):
        status, lines = run(directory / "first", "trainer.val_check_interval=2", limit)
        assert status == 0, lines
    train(config(directory / "second", *common, "model.optim.lr=0.123"))
    return directory / "first", directory / "second"


def cells(page: str) -> list[list[str]]:
    """Return the rows of all tables."""
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", page)]


def test_a_resumed_run(runs: tuple[Path, Path]) -> None:
    page = render_runs(runs[:1])
    rows = {row[0]: row[1:] for row in cells(page)}
    (opened,) = open_runs(runs[:1])
    assert rows["last step"] == ["6"] and rows["starts"] == ["2"]
    assert rows["lowest validation loss"][0].endswith(("step 2", "step 4", "step 6"))
    assert rows["training loss"] == [f"{opened.curves['reduced_train_loss'][1][-1]:.4f}"]
    assert rows["hardware"] == ["1 x cpu"]
    assert re.search(r"start 1, in /[^<]*: <code>", page) and "trainer.max_steps=6</code>" in page
    assert ["trainer.max_steps", "4", "6"] in cells(page)
    starts = [row for row in cells(page) if row[0] == "first" and len(row) == 10]
    assert [row[1] for row in starts] == ["1", "2"]
    machine = f"{platform.node()}, {read_cpu_fields().get('model name', platform.machine())}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    assert rows["machine"] == [f"{machine}, {versions}"]
    assert all(row[6] == f"1 x cpu; {machine}, {versions}" for row in starts)
    assert all(row[7].startswith(f"bionemo {__version__}") for row in starts)
    assert ["model.optim.name", "fused_adam"] in cells(page)  # all settings
    assert "ExpManager schema" not in page
    assert opened.curves["val_loss"][0].tolist() == [2, 4, 6]
    first, second = opened.starts
    assert (first["first_step"], first["step"], first["ended"]) == (0, 4, "finished")
    assert (second["first_step"], second["step"], second["ended"]) == (4, 6, "finished")
    assert first["resumed_from"] is None and "step=4" in second["resumed_from"]
    assert second["metrics"]["val_loss"] == pytest.approx(opened.curves["val_loss"][1][-1])
    (state,) = (runs[0] / "checkpoints").glob("*-last/state.json")
    tokens = int(re.findall(r'"consumed_tokens", (\d+)', state.read_text())[-1])
    fill = tokens / (6 * 4 * 64)  # steps, rows and tokens of a row
    assert float(rows["packing efficiency"][0].split("%")[0]) == pytest.approx(100 * fill, abs=5)
    assert "resuming from" in page
    assert "http-equiv" not in page and "cdn." not in page.partition("<h2>Settings")[0][-2000:]
    assert "<iframe" in RunReport(*runs)._repr_html_()


def test_runs_with_other_validations(runs: tuple[Path, Path], tmp_path: Path) -> None:
    note = "Validations differ in data, lengths or masks: their losses are not comparable."
    assert note not in render_runs(runs)
    other = shutil.copytree(runs[0], tmp_path / "other")
    content = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(content | {"validation": "0" * 32}))
    assert note in render_runs([runs[1], other])


def test_two_runs_side_by_side(runs: tuple[Path, Path]) -> None:
    page = render_runs([*runs, runs[0] / ".." / runs[0].name])
    rows = {row[0]: row[1:] for row in cells(page)}
    assert rows[""] == ["first", "second"]
    assert rows["model.optim.lr"][-1] == "0.123" != rows["model.optim.lr"][0]
    assert rows["starts"] == ["2", "1"]


def test_names_are_distinct(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    assert [each.name for each in open_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["a/run", "b/run"]


def test_directories_with_little_in_them(tmp_path: Path) -> None:
    write_events(tmp_path, {"lr": [0.5, 0.25], "</script><i>": [1.0, 2.0]})
    (tmp_path / "report.json").write_text('{"suites": {"a": {}}}')
    page = render_runs([tmp_path])
    assert "<h2>Curves</h2>" in page
    assert "</script><i>" not in page
    for name, content in (("config.yaml", "model: ["), ("run.json", "{")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            render_runs([tmp_path])
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "config.yaml").write_text("a: 1")
    assert "no event files" in render_runs([tmp_path])


def test_secrets_are_redacted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"exp_manager:\n  wandb_logger_kwargs:\n    api_key: {SECRET}\n")
    (tmp_path / "cmd-args.log").write_text(
        f"pretrain.py --config-name=x exp_manager.wandb_logger_kwargs.api_key={SECRET}"
    )
    page = render_runs([tmp_path])
    assert SECRET not in page
    assert "--config-name=x" in page


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bionemo.cli", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", ">a\nMKV\n"
    page.write_text(text)
    with pytest.raises(
        UserError, match=r"page.html exists and was not written by this command: choose another --output"
    ):
        write_page(page, html_page("Title", []))
    assert page.read_text() == text
    page.unlink()
    for title in ("One", "Two"):
        write_page(page, html_page(title, []))
    assert "Two" in page.read_text()


def test_command(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = report(runs[0], "--output", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, f"report: {tmp_path / 'page.html'}\n"), done.stderr
    assert "<h2>Curves</h2>" in (tmp_path / "page.html").read_text()
    for directory, message in (
        (tmp_path / "nowhere", "is not the directory of a run"),
        (tmp_path, "is not the directory of a run"),
    ):
        done = report(directory)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {directory} {message}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_loss_curves_for_a_paper(tmp_path: Path, suffix: str, magic: bytes) -> None:
    """The lines of the SVG have as many points as the event files of the two runs."""
    for name, length in (("first", 3), ("second", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}")
        facts = {"parameters": 1, "devices": 1, "device": "cpu", "reference_losses": {"frequencies": 2.8}}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
        write_events(tmp_path / name, {"reduced_train_loss": [3.0, 2.5, 2.2, 2.1, 2.0][:length]})
    options = Namespace(
        runs=[tmp_path / "first", tmp_path / "second"], output=tmp_path / f"x{suffix}", watch=False
    )  # fmt: skip
    command.report(options)
    written = options.output.read_bytes()
    assert written.startswith(magic)
    if suffix == ".svg":
        text = written.decode()
        assert all(f">{word}</text>" in text for word in ("first", "second", "frequencies", "step"))
        lines = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #(?:0072b2|d55e00)', text)
        assert [line.count("L") + 1 for line in lines] == [3, 5]
    with pytest.raises(UserError, match="exists: move it away"):
        command.report(options)
    assert options.output.read_bytes() == written
    with pytest.raises(UserError, match="--watch updates a page"):
        command.report(Namespace(**{**vars(options), "watch": True}))


def test_a_run_without_losses_has_no_loss_curve(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="has no event file with losses"):
        command.report(Namespace(runs=[tmp_path], output=tmp_path / "x.svg", watch=False))


def test_watch(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []

    def sleep(seconds: float) -> None:
        assert seconds == 30
        pages.append((tmp_path / "page.html").read_text())
        if len(pages) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        command.report(Namespace(runs=runs[:1], output=tmp_path / "page.html", watch=True))
    assert all('<meta http-equiv="refresh" content="30">' in page for page in pages)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("number", [1, 2])
def test_a_browser_draws_the_curves(runs: tuple[Path, Path], tmp_path: Path, width: int, number: int) -> None:
    """Without errors on its console and without network; the canvas elements have the width of the window."""
    (tmp_path / "page.html").write_text(render_runs(runs[:number]))
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * 0.0.0.0", "--enable-logging=stderr", f"--window-size={width},2600",
        "--hide-scrollbars", "--virtual-time-budget=5000", f"--screenshot={tmp_path / 'page.png'}",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert any("document idle" in line for line in console)
    assert all("[bokeh" in line for line in console)
    from matplotlib.image import imread

    image = imread(tmp_path / "page.png")[:, :, :3]
    assert image.shape[1] == width
    blue = (np.abs(image - np.array([0x00, 0x72, 0xB2]) / 255) < 0.02).all(-1)
    assert blue[400:2000].sum() > 500
