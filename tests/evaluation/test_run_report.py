# SPDX-License-Identifier: Apache-2.0
"""`bionemo report`: event files, downsampling, and pages of complete, running, damaged and several runs."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from bionemo.common.errors import UserError
from bionemo.evaluation import run_report
from bionemo.evaluation.event_files import Scalars, downsample, join, read_events
from bionemo.evaluation.html import html_page, write_page
from bionemo.evaluation.run_files import open_runs
from bionemo.evaluation.run_report import RunReport, render_runs, watch
from tests.support.runs import config, run, train

pytest.importorskip("bokeh")
SECRET = "hf_" + "Zx9Qw3Er7Ty1Ui5Op2As4Df6Gh8Jk0Lz"


def write_events(directory: Path, values: dict[str, list[float]]) -> Path:
    """Write values of the steps 10, 20 and so on, as TensorBoard does."""
    writer = EventFileWriter(str(directory))
    for number in range(max(map(len, values.values()))):
        for tag, series in values.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=series[number])])
            writer.add_event(Event(wall_time=1.7e9 + number, step=10 * (number + 1), summary=summary))
    writer.close()
    return max(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)


def scalars(values: list[float]) -> Scalars:
    numbers = np.arange(len(values))
    return Scalars(numbers, np.array(values, np.float64), numbers.astype(np.float64))


def test_events_equal_those_of_tensorboard(tmp_path: Path) -> None:
    path = write_events(tmp_path, {"lr": [0.5, 0.25, 1e-9], "val_loss": [3.0, float("nan"), 2.0]})
    expected, found = EventAccumulator(str(path)).Reload(), read_events(path)
    assert found.problem is None
    assert set(found.scalars) == {"lr", "val_loss"}
    for tag, series in found.scalars.items():
        events = expected.Scalars(tag)
        assert series.steps.tolist() == [event.step for event in events]
        np.testing.assert_array_equal(series.values, [event.value for event in events])
        assert series.times.tolist() == [event.wall_time for event in events]
    assert (found.begin, found.end) == (1.7e9, 1.7e9 + 2)


def test_truncated_and_damaged_event_files(tmp_path: Path) -> None:
    path = write_events(tmp_path, {"lr": [0.5, 0.25, 0.125]})
    whole = path.read_bytes()
    last = whole.rindex(b"lr")
    for size in (len(whole) - 1, last, last - 20):
        path.write_bytes(whole[:size])
        found = read_events(path)
        assert found.problem == "the last record is incomplete"
        assert found.scalars["lr"].values.tolist() == [0.5, 0.25]
    path.write_bytes(whole[: last - 12] + b"\xff" * 12 + whole[last:])
    assert "record" in (read_events(path).problem or "")
    path.write_bytes(b"")
    assert read_events(path).scalars == {}


def test_of_a_step_that_was_trained_again_the_last_value_is_kept() -> None:
    first, second = scalars([1, 2, 3]), Scalars(np.array([2, 3]), np.array([20.0, 30.0]), np.array([7.0, 8.0]))
    assert join([first, second]).values.tolist() == [1, 2, 20, 30]
    assert join([first, second]).times.tolist() == [0, 1, 7, 8]


def test_downsampling_keeps_spikes() -> None:
    values = [1.0 + 0.1 * (number % 7) for number in range(10_000)]
    values[4_321], values[7_654], values[9_000] = 99.0, -99.0, float("nan")
    found = downsample(scalars(values), 100)
    assert len(found.values) <= 203
    assert {4_321, 7_654, 9_000, 9_999} <= set(found.steps.tolist())
    assert (np.diff(found.steps) > 0).all()
    np.testing.assert_array_equal(found.values, np.array(values)[found.steps])
    hand = downsample(scalars([5, 1, 9, 4, 4, 8, 2, 3]), 2)
    assert hand.steps.tolist() == [1, 2, 5, 6, 7]  # extremes of the halves, and the last point
    assert downsample(scalars([1, 2, 3]), 2).values.tolist() == [1, 2, 3]


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
    assert rows["last step"] == ["6"] and rows["processes"] == ["2"]
    assert rows["lowest validation loss"][0].endswith(("step 2", "step 4", "step 6"))
    assert rows["training loss"] == [f"{opened.scalars['reduced_train_loss'].values[-1]:.4f}"]
    assert rows["hardware"] == ["1 x cpu"]
    assert rows["trainer.max_steps"][-1] == "6"
    assert len(opened.scalars["val_loss"].steps) == 3
    (state,) = (runs[0] / "checkpoints").glob("*-last/state.json")
    tokens = int(re.findall(r'"consumed_tokens", (\d+)', state.read_text())[-1])
    fill = tokens / (6 * 4 * 64)  # steps, rows and tokens of a row
    assert float(rows["packing efficiency"][0].split("%")[0]) == pytest.approx(100 * fill, abs=5)
    assert "resuming from" in page and "parameters, precision" in page
    assert not list(opened.problems)
    assert "http-equiv" not in page and "cdn." not in page.partition("<h2>Settings")[0][-2000:]
    assert "<iframe" in RunReport(*runs)._repr_html_()


def test_two_runs_side_by_side(runs: tuple[Path, Path]) -> None:
    page = render_runs([*runs, runs[0] / ".." / runs[0].name])
    rows = {row[0]: row[1:] for row in cells(page)}
    assert rows[""] == ["first", "second"]
    assert rows["model.optim.lr"][-1] == "0.123" != rows["model.optim.lr"][-2]
    assert rows["processes"] == ["2", "1"]


def test_names_are_distinct(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    assert [each.name for each in open_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["a/run", "b/run"]


def test_what_is_missing_is_stated(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: [\n")
    page = render_runs([tmp_path])
    for text in ("no event files", "config.yaml is missing or damaged", "no log of rank 0"):
        assert text in page
    path = write_events(tmp_path, {"lr": [0.5, 0.25], "</script><i>": [1.0, 2.0]})
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "report.json").write_text('{"suites": {"a": {}}}')
    page = render_runs([tmp_path])
    assert "the last record is incomplete" in page
    assert "report.json is damaged" in page
    assert "</script><i>" not in page


def test_secrets_are_redacted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"exp_manager:\n  wandb_logger_kwargs:\n    api_key: {SECRET}\n")
    (tmp_path / "cmd-args.log").write_text(
        f"pretrain.py --config-name=x exp_manager.wandb_logger_kwargs.api_key={SECRET}"
    )
    page = render_runs([tmp_path])
    assert SECRET not in page
    assert "the configuration x cannot be read" in page


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
        (tmp_path / "nowhere", "is not a directory"),
        (tmp_path, "is not the directory of a run"),
    ):
        done = report(directory)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {directory} {message}") and done.stderr.count("\n") == 1


def test_watch(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []

    def sleep(seconds: float) -> None:
        assert seconds == 30
        pages.append((tmp_path / "page.html").read_text())
        if len(pages) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_report.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch(runs[:1], tmp_path / "page.html", 30)
    assert all('<meta http-equiv="refresh" content="30">' in page for page in pages)


def test_utilization_is_hand_computed() -> None:
    text = run_report._utilization("650,000,000", "bf16-mixed", "2", "NVIDIA H100 80GB HBM3", 100_000.0)
    assert text.startswith("19.7%")  # 6 * 650e6 * 1e5 / (2 * 989e12)
    assert run_report._utilization("1,000", "32", "1", "cpu", 5.0) == ""


@pytest.mark.slow
def test_a_million_points(tmp_path: Path) -> None:
    """At most 5 s and 5 MB."""
    tags = ("reduced_train_loss", "lr", "grad_norm", "tokens_per_second", "val_loss")
    with (tmp_path / "events.out.tfevents.1.host.1.0").open("wb") as file:
        for step in range(200_000):
            for tag in tags:
                value = Summary.Value(tag=tag, simple_value=3.0 + np.sin(step))
                record = Event(wall_time=1e9 + step, step=step, summary=Summary(value=[value])).SerializeToString()
                file.write(len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4))
    begin = time.monotonic()
    done = report(tmp_path, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 5
    assert (tmp_path / "page.html").stat().st_size < 5e6


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
    blue = (np.abs(image - np.array([0x1F, 0x77, 0xB4]) / 255) < 0.02).all(-1)
    assert blue[400:2000].sum() > 500
