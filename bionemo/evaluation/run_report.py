# SPDX-License-Identifier: Apache-2.0
"""Report of pretraining runs: one HTML page with interactive curves that needs no network.

Everything is read from the directories of the runs: `run.json` of each start, TensorBoard's event files, config.yaml,
the command line, the log, and reports of `bionemo evaluate`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from bionemo.common.errors import UserError, optional_dependency
from bionemo.common.figures import PALETTE, new_figure, plain, plot_references, render
from bionemo.common.redaction import redact_arguments, redact_text, redact_tree
from bionemo.common.regular import load_json
from bionemo.evaluation.events import read_scalars
from bionemo.evaluation.html import html_page, html_table, write_page

_BUCKETS = 1000  # of a curve; the smallest and the largest value of each is shown
_CURVES = (  # title, logarithmic, metrics with their line widths
    ("loss, nats", False, (("reduced_train_loss", 1.0), ("val_loss", 2.5))),
    ("learning rate", False, (("lr", 1.5),)),
    ("gradient norm", True, (("grad_norm", 1.0),)),
    ("tokens/s", False, (("tokens_per_second", 1.0),)),
)
_NOT_SHOWN = {"hp_metric", "global_step", "consumed_samples", "epoch", "train_step_timing in s", "val_perplexity"}
_LINES = 100  # of the log
_MAX_BYTES = 1 << 20  # of run.json


@dataclass(frozen=True)
class Run:
    """Directory of a run, the parent of its checkpoints."""

    path: Path
    name: str  # unique in a report

    @cached_property
    def curves(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Steps and values of each metric; of a step that was trained again, the last value."""
        parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        for path in (path for each in (*self._earlier(), self.path) for path in sorted(each.glob("*.tfevents.*"))):
            for tag, steps, values in read_scalars(path):
                parts.setdefault(tag, []).append((steps, values))
        curves = {}
        for tag, found in parts.items():
            steps, values = (np.concatenate(each)[::-1] for each in zip(*found, strict=True))
            known, last = np.unique(steps, return_index=True)
            curves[tag] = (known, values[last])
        return curves

    def _earlier(self) -> list[Path]:
        """Return the directories with the logs of earlier starts, the first start first."""
        return sorted(self.path.glob("run_*/"), key=lambda path: (len(path.name), path.name))

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """Content of `run.json` of each start, in order, with its `config`, `command` and version of the `code`."""
        found = []
        for directory in (*self._earlier(), self.path):
            path = directory / "run.json"
            if path.is_file():
                try:
                    start = load_json(path, _MAX_BYTES)
                    if not isinstance(start, dict) or not start.keys() >= {"parameters", "devices", "device"}:
                        raise ValueError("not written by a run")
                except (OSError, ValueError) as error:
                    raise UserError(f"{path} is damaged ({error}): move it away") from error
                found.append({**start, **_settings_of(directory)})
        return found

    @property
    def log(self) -> str:
        """The last lines of the log of rank 0."""
        lines = [
            line
            for path in sorted(self.path.glob("nemo_log_globalrank-0_*.txt"))
            for line in _read_text(path).splitlines()
            if " exp_manager:" not in line  # NeMo's defaults, which are not those of the run
        ]
        return redact_text("\n".join(lines[-_LINES:]))


def _settings_of(directory: Path) -> dict[str, Any]:
    """Return the values of config.yaml by key, the command line, and the version of the code, with its commit.

    Raises:
        UserError: if config.yaml is damaged.
    """
    path = directory / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): move it away") from error
    command, code = (_read_text(directory / name) for name in ("cmd-args.log", "git-info.log"))
    lines = [line[:25] for line in code.splitlines()]  # "commit hash: " and 12 digits
    changed = f", {len(lines) - 2} changed files" if len(lines) > 2 else ""
    return {
        "config": _flatten(redact_tree(found)), "command": " ".join(redact_arguments(command.strip().split(" "))),
        "code": ", ".join(lines[:2]) + changed,
    }  # fmt: skip


def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in these directories, named by the shortest distinct ends of their paths.

    Raises:
        UserError: if a directory does not exist, or is not that of a run.
    """
    for path in map(Path, paths):
        if not any(
            any(path.glob(name)) for name in ("config.yaml", "run.json", "checkpoints", "events.out.tfevents.*")
        ):
            has_head = (Path(path) / "head.safetensors").exists()
            remedy = "look at its report.png" if has_head else "give one that contains config.yaml or run.json"
            raise UserError(f"{path} is not the directory of a {'pretraining ' * has_head}run: {remedy}")
    full = list(dict.fromkeys(Path(path).resolve() for path in paths))
    depth = 1
    while len({path.parts[-depth:] for path in full}) < len(full):
        depth += 1
    return [Run(path, "/".join(path.parts[-depth:])) for path in full]


def render_runs(paths: Sequence[str | Path], refresh: int | None = None) -> str:
    """Return an HTML page about one run, or several side by side.

    Args:
        paths: directories of the runs.
        refresh: the browser loads the page again after so many seconds.

    Raises:
        UserError: if a directory is not that of a run, a file is damaged, or Bokeh is not installed.
    """
    runs = open_runs(paths)
    parts = [f'<meta http-equiv="refresh" content="{refresh}">'] if refresh else []
    facts = [_facts(run) for run in runs]
    rows = [(key, *(each[key] for each in facts)) for key in facts[0] if any(each[key] for each in facts)]
    table = html_table(("", *(run.name for run in runs)), rows)
    if len({run.starts[-1].get("validation") for run in runs if run.starts}) > 1:
        parts.append("<p>Validations differ in data, lengths or masks: their losses are not comparable.</p>")
    parts += [f'<div class="texts">{table}</div>', *_plots(runs), *_starts(runs), *_settings(runs)]
    for run in runs:
        for title, text in {"Evaluations": _evaluations(run), "Log": run.log}.items():
            parts += [f"<h2>{title}: {escape(run.name)}</h2><pre>{escape(text)}</pre>"] if text else []
    return html_page(runs[0].name if len(runs) == 1 else "Comparison of runs", parts)


def plot_losses(paths: Sequence[str | Path], suffix: str) -> bytes:
    """Return the losses of runs as a figure, see `figures.render`: training losses as lines, validation as points.

    Raises:
        UserError: if a directory is not that of a run or has no losses, a file is damaged, or Matplotlib is missing.
    """
    runs = open_runs(paths)
    metrics = _CURVES[0][2]
    if missing := [run.path for run in runs if not any(tag in run.curves for tag, _ in metrics)]:
        raise UserError(f"{missing[0]} has no event file with losses (exp_manager.create_tensorboard_logger)")
    references = [run.starts[-1].get("reference_losses", {}) if run.starts else {} for run in runs]
    with new_figure(3.5, 2.6) as figure:
        axes = figure.subplots()
        for (number, run), (tag, width) in ((run, metric) for run in enumerate(runs) for metric in metrics):
            if tag in run.curves:
                single, is_validation = len(runs) == 1, tag == "val_loss"
                label = ("validation" if is_validation else "training") if single else plain(run.name)
                axes.plot(
                    *downsample(*run.curves[tag], _BUCKETS), "o-" if is_validation else "-", linewidth=width / 2,
                    color=PALETTE[(metrics.index((tag, width)) if single else number) % len(PALETTE)],
                    alpha=1 if is_validation else 0.6, zorder=2 + is_validation,
                    label=label if single or is_validation or "val_loss" not in run.curves else None,
                )  # fmt: skip
        restarts = [start["first_step"] for start in runs[0].starts if len(runs) == 1 and start["first_step"]]
        for number, step in enumerate(restarts):
            axes.axvline(step, color="gray", linewidth=0.5, label="" if number else "restart")
        if all(each == references[0] for each in references):
            plot_references(axes, references[0])
        axes.set(xlabel="step", ylabel="loss, nats per target token")
        axes.locator_params(axis="x", integer=True)
        figure.legend(
            loc="outside upper left", ncols=2, title="" if len(runs) == 1 else "lines: training, points: validation"
        )
        return render(figure, suffix)


class RunReport:
    """A report that a notebook displays.

    Args:
        paths: directories of the runs.

    Raises:
        UserError: see `render_runs`.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.html = render_runs(paths)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" style="width: 100%; height: 50rem; border: 0"></iframe>'

    def write(self, path: Path) -> None:
        """Write the page to a file; see `write_page`."""
        write_page(path, self.html)


def _facts(run: Run) -> dict[str, str]:
    """Return the cells of the summary."""

    def last(tag: str, form: str) -> str:
        return format(run.curves[tag][1][-1], form) if tag in run.curves else ""

    start = run.starts[-1] if run.starts else {}
    speed = run.curves.get("tokens_per_second")
    rate = float(np.median(speed[1])) if speed else None
    steps, losses = run.curves.get("val_loss", (np.zeros(0, np.int64), np.zeros(0)))
    best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else None
    checkpoints = [path.parent for path in run.path.glob("checkpoints/*/manifest.json")]
    return {
        "last step": f"{max((int(steps[-1]) for steps, _ in run.curves.values()), default=start.get('step', 0)):,}",
        "training loss": last("reduced_train_loss", ".4f"),
        "lowest validation loss": "" if best is None else f"{losses[best]:.4f} at step {steps[best]:,}",
        "tokens/s": "" if rate is None else f"{rate:,.0f} (median)",
        "packing efficiency": _packing_efficiency(run, start.get("tokens_per_step")),
        "sequences": last("consumed_samples", ",.0f"),
        "parameters": f"{start['parameters']:,}" if start else "",
        "precision": start.get("precision", ""),
        "hardware": f"{start['devices']} x {start['device']}" if start else "",
        "machine": _machine(start),
        "records": ", ".join(f"{name} {count:,}" for name, count in start.get("records", {}).items()),
        "MFU": f"{np.median(run.curves['mfu'][1]):.1%} (median)" if "mfu" in run.curves else "",
        "starts": str(len(run.starts)),
        "checkpoints": ", ".join(sorted(path.name for path in checkpoints)),
    }


def _machine(start: Mapping[str, Any]) -> str:
    """Return host, CPU and versions of a start; "" if they are not known."""
    versions = [f"{name} {version}" for name, version in start.get("versions", {}).items()]
    return ", ".join(filter(None, [start.get("host"), start.get("cpu"), *versions]))


def _packing_efficiency(run: Run, tokens: int | None) -> str:
    """Return the share of the tokens of a step of the last start that is not padding."""
    speed, seconds = run.curves.get("tokens_per_second"), run.curves.get("train_step_timing in s")
    if not tokens or speed is None or seconds is None or len(speed[1]) != len(seconds[1]):
        return ""
    found = (speed[1] * seconds[1])[speed[0] > run.starts[-1]["first_step"]]
    return f"{np.median(found) / tokens:.1%} of a step is not padding" if len(found) else ""


def _plots(runs: Sequence[Run]) -> list[str]:
    """Return the library and the curves as HTML."""
    if not any(run.curves for run in runs):
        return ["<p>There are no event files with values, so no curves (exp_manager.create_tensorboard_logger).</p>"]
    with optional_dependency("report", "a report"):
        from bokeh.embed import components
        from bokeh.resources import Resources

    tags = dict.fromkeys(tag for run in runs for tag in run.curves)
    sources = tuple((tag, 1.5) for tag in tags if tag.startswith("val_loss/")) if len(runs) == 1 else ()
    curves = (*_CURVES[:1], ("validation loss of each source, nats", False, sources), *_CURVES[1:])
    shown = {tag for *_, metrics in curves for tag, _ in metrics} | _NOT_SHOWN
    figures: list[Any] = []
    for title, logarithmic, metrics in (*curves, *((tag, False, ((tag, 1.5),)) for tag in tags if tag not in shown)):
        if any(tag in run.curves for run in runs for tag, _ in metrics):
            figures.append(_curve(title, logarithmic, metrics, runs, figures[0].x_range if figures else None))
    script, divs = components(figures)
    restarts = "<p>Dotted: restarts.</p>" if any(start["first_step"] for run in runs for start in run.starts) else ""
    return [Resources(mode="inline", components=["bokeh"]).render(), "<h2>Curves</h2>", restarts, *divs, script]


def _curve(
    title: str, logarithmic: bool, metrics: Sequence[tuple[str, float]], runs: Sequence[Run], x_range: Any
) -> Any:
    """Return a figure with the metrics of all runs; restarts are dotted lines."""
    from bokeh.models import HoverTool
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    more: dict[str, Any] = {"x_range": x_range} if x_range is not None else {}
    plot: Any = figure(
        height=320, sizing_mode="stretch_width", x_axis_label="step", y_axis_label=title, output_backend="canvas",
        y_axis_type="log" if logarithmic else "linear", tools="pan,box_zoom,wheel_zoom,reset,save", **more,
    )  # fmt: skip
    plot.toolbar.logo, plot.min_border_left = None, 75
    plot.xaxis.formatter.use_scientific = False
    if not logarithmic:
        plot.yaxis.formatter.power_limit_low, plot.yaxis.formatter.power_limit_high = -6, 9
    for (number, run), (tag, width) in ((run, metric) for run in enumerate(runs) for metric in metrics):
        if tag in run.curves:
            steps, values = downsample(*run.curves[tag], _BUCKETS)
            label = " ".join(filter(None, (run.name if len(runs) > 1 else "", tag if len(metrics) > 1 else "")))
            dash = "dashed" if width > 2 and len(runs) > 1 else "solid"
            style = {
                "color": PALETTE[(metrics.index((tag, width)) if len(runs) == 1 else number) % len(PALETTE)],
                "source": {"x": steps, "y": values},
                **({"legend_label": label} if label else {}),
            }
            plot.line("x", "y", line_width=width, line_dash=dash, **style)
            if len(steps) < 100:
                plot.scatter("x", "y", size=5, **style)
    for start in (start for run in runs for start in run.starts if start["first_step"]):
        plot.add_layout(Span(location=start["first_step"], dimension="height", line_dash="dotted"))
    plot.add_tools(HoverTool(tooltips=[("step", "@x{0,0}"), (title, "@y{0.0000e+0}")], mode="vline"))
    if plot.legend:
        plot.legend.click_policy, plot.legend.orientation, plot.legend.glyph_width = "hide", "horizontal", 40
        plot.legend.ncols, plot.legend.border_line_width, plot.legend.location = 2, 0, "top_left"
        plot.add_layout(plot.legend[0], "above")
    return plot


def downsample(
    steps: NDArray[np.int64], values: NDArray[np.float64], buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Keep the smallest and the largest value of each of `buckets` ranges of points; nan counts as both."""
    ranges = [part for part in np.array_split(np.arange(len(values)), buckets) if len(part)]
    kept = np.unique([part[choose(values[part])] for part in ranges for choose in (np.argmin, np.argmax)])
    return steps[kept], values[kept]


def _starts(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table of the starts of the runs, and the settings that changed between the starts of each run."""
    rows = [
        (run.name, str(number), _date(start["begin"]), _date(start["updated"]), f"{start['first_step']:,}",
         f"{start['step']:,}", f"{start['devices']} x {start['device']}; {_machine(start)}".rstrip("; "),
         start["code"], start["ended"] or "", start["resumed_from"] or "")
        for run in runs for number, start in enumerate(run.starts, 1)
    ]  # fmt: skip
    yield "<h2>Starts</h2>"
    columns = (
        "run", "start", "begin", "last written", "first step", "last step", "hardware", "code", "ended", "resumed from"
    )  # fmt: skip
    yield f'<div class="texts">{html_table(columns, rows)}</div>'
    for run in runs:
        names = [f"start {number + 1}" for number in range(len(run.starts))]
        if table := _differences(names, [start["config"] for start in run.starts]):
            yield f"<h3>Settings that changed: {escape(run.name)}</h3>{table}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the command lines, and a table of the settings that differ between the runs."""
    yield "<h2>Settings</h2>"
    for run in runs:
        for number, start in enumerate(run.starts or [_settings_of(run.path)], 1):
            place = f", in {escape(str(start['directory']))}" if start.get("directory") else ""
            yield f"<p>{escape(run.name)}, start {number}{place}: <code>{escape(start['command'])}</code></p>"
        settings = ((key, redact_text(str(value))) for key, value in _settings_of(run.path)["config"].items())
        table = html_table(("key", "value"), settings)
        yield f'<details class="texts"><summary>All settings: {escape(run.name)}</summary>{table}</details>'
    yield _differences([run.name for run in runs], [_settings_of(run.path)["config"] for run in runs])


def _differences(columns: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the keys that have different values in the columns, or ""."""
    values = {
        key: [redact_text(str(config.get(key, ""))) for config in configs]
        for key in dict.fromkeys(key for config in configs for key in config)
    }
    rows = [(key, *each) for key, each in values.items() if len(set(each)) > 1]
    return f'<div class="texts">{html_table(("key", *columns), rows)}</div>' if rows else ""


def _evaluations(run: Run) -> str:
    """Return the summaries of evaluations that are in the directory of a run."""
    lines: list[str] = []
    for path in sorted({*run.path.glob("report.json"), *run.path.glob("*/report.json")}):
        from bionemo.evaluation.report import describe_report, read_report  # imports torch, which takes seconds

        with suppress(
            UserError, LookupError, TypeError, AttributeError
        ):  # a report of `bionemo finetune`, or of another version
            lines += describe_report(read_report(path.parent), path.parent)
    return redact_text("\n".join(lines))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
