# SPDX-License-Identifier: Apache-2.0
"""Report of pretraining runs: one HTML page with interactive curves that needs no network.

Everything is read from the directories of the runs (`run_files`), also the reports of `bionemo evaluate` in them.
"""

import re
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bionemo.common.errors import UserError, optional_dependency
from bionemo.common.redaction import redact_text
from bionemo.config.compose import load_plain
from bionemo.evaluation import event_files
from bionemo.evaluation.html import html_page, html_table, write_page
from bionemo.evaluation.run_files import Run, flatten, open_runs
from bionemo.planning.devices import match_device

_POINTS = 2000  # of a curve, at most
_CURVES = (  # title, logarithmic, metrics with their line widths
    ("loss, nats", False, (("reduced_train_loss", 1.0), ("val_loss", 2.5))),
    ("learning rate", False, (("lr", 1.5),)),
    ("gradient norm", True, (("grad_norm", 1.0),)),
    ("tokens/s", False, (("tokens_per_second", 1.0),)),
)
_NOT_SHOWN = {"hp_metric", "global_step", "consumed_samples", "epoch", "train_step_timing in s", "val_perplexity"}
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_CAPACITY = re.compile(r", ([\d,]+) tokens (?:in [^,]*)?per step")  # of all rows of a step
_HEADER = re.compile(r": ([\d,]+) parameters, precision (\S+?),? .*?on (\d+) x ([^,]+),")


def render_runs(paths: Sequence[str | Path], refresh: int | None = None) -> str:
    """Return an HTML page about one run, or several side by side.

    Args:
        paths: directories of the runs.
        refresh: the browser loads the page again after so many seconds.

    Raises:
        UserError: if a directory is not that of a run, or Bokeh is not installed.
    """
    runs = open_runs(paths)
    parts = [f'<meta http-equiv="refresh" content="{refresh}">'] if refresh else []
    parts += [_summary(runs), *_problems(runs), *_plots(runs), *_settings(runs), *_results(runs), *_messages(runs)]
    return html_page(runs[0].name if len(runs) == 1 else "Comparison of runs", parts)


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


def _summary(runs: Sequence[Run]) -> str:
    rows = [row for row in zip(_FACTS, *map(_facts, runs), strict=True) if any(row[1:])]
    return html_table(("", *(run.name for run in runs)), rows)


_FACTS = (
    "last step", "training loss", "lowest validation loss", "tokens/s", "packing efficiency", "sequences",
    "parameters", "precision", "hardware", "MFU", "processes", "begin", "end of the last values",
)  # fmt: skip


def _facts(run: Run) -> list[str]:
    """Return the cells of the summary, in the order of `_FACTS`."""

    def last(tag: str, form: str) -> str:
        return format(run.scalars[tag].values[-1], form) if tag in run.scalars else ""

    speed = run.scalars.get("tokens_per_second")
    rate = float(np.median(speed.values)) if speed else None
    losses = run.scalars.get("val_loss")
    lowest = ""
    if losses is not None and np.isfinite(losses.values).any():
        index = int(np.nanargmin(losses.values))
        lowest = f"{losses.values[index]:.4f} at step {losses.steps[index]:,}"
    steps = max((int(each.steps.max()) for each in run.scalars.values()), default=None)
    header = next(filter(None, (_HEADER.search(text) for _, text in reversed(run.messages))), None)
    parameters, precision, number, device = header.groups() if header else ("", "", "", "")
    return [
        "" if steps is None else f"{steps:,}", last("reduced_train_loss", ".4f"), lowest,
        "" if rate is None else f"{rate:,.0f} (median)", _packing_efficiency(run), last("consumed_samples", ",.0f"),
        parameters, precision,
        f"{number} x {device}" if header else "", _utilization(parameters, precision, number, device, rate),
        str(len(run.events)), *map(_date, [run.events[0].begin, run.events[-1].end] if run.events else [0, 0]),
    ]  # fmt: skip


def _packing_efficiency(run: Run) -> str:
    """Return the share of the tokens of a step that is not padding."""
    header = next(filter(None, (_CAPACITY.search(text) for _, text in reversed(run.messages))), None)
    speed, seconds = run.scalars.get("tokens_per_second"), run.scalars.get("train_step_timing in s")
    if header is None or speed is None or seconds is None or len(speed.values) != len(seconds.values):
        return ""
    fill = np.median(speed.values * seconds.values) / int(header[1].replace(",", ""))
    return f"{fill:.1%} of a step is not padding"


def _utilization(parameters: str, precision: str, number: str, device: str, rate: float | None) -> str:
    """Return the model FLOPs utilization: 6 FLOPs per parameter and token, without attention."""
    known = match_device(device)
    if known is None or rate is None:
        return ""
    peak = 1e12 * (known.single if precision == "32" else known.half) * int(number)
    return f"{6 * int(parameters.replace(',', '')) * rate / peak:.1%} (6 x parameters x tokens/s / peak)"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else ""


def _problems(runs: Sequence[Run]) -> list[str]:
    items = [f"<li>{escape(f'{run.name}: {problem}')}</li>" for run in runs for problem in run.problems]
    return [f"<p>Not shown:</p><ul>{''.join(items)}</ul>"] if items else []


def _plots(runs: Sequence[Run]) -> list[str]:
    """Return the library, the curves and the timeline as HTML."""
    if not any(run.scalars for run in runs):
        return []
    with optional_dependency("report", "a report"):
        from bokeh.embed import components
        from bokeh.resources import Resources

    shown = {tag for *_, metrics in _CURVES for tag, _ in metrics} | _NOT_SHOWN
    others = dict.fromkeys(tag for run in runs for tag in run.scalars if tag not in shown)
    curves = [*_CURVES, *((tag, False, ((tag, 1.5),)) for tag in others)]
    figures: list[Any] = []
    for title, logarithmic, metrics in curves:
        if any(tag in run.scalars for run in runs for tag, _ in metrics):
            figures.append(_curve(title, logarithmic, metrics, runs, figures[0].x_range if figures else None))
    script, divs = components([*figures, _timeline(runs)])
    return [Resources(mode="inline", components=["bokeh"]).render(), "<h2>Curves</h2>", *divs[:-1],
            "<h2>Processes and checkpoints</h2>", divs[-1], script]  # fmt: skip


def _curve(
    title: str, logarithmic: bool, metrics: Sequence[tuple[str, float]], runs: Sequence[Run], x_range: Any
) -> Any:
    """Return a figure with the metrics of all runs; restarts are dotted lines."""
    from bokeh.models import HoverTool
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    more: dict[str, Any] = {"x_range": x_range} if x_range is not None else {}
    plot: Any = figure(
        title=title, height=280, sizing_mode="stretch_width", x_axis_label="step", output_backend="canvas",
        y_axis_type="log" if logarithmic else "linear", tools="pan,box_zoom,wheel_zoom,reset,save", **more,
    )  # fmt: skip
    plot.toolbar.logo, plot.min_border_left = None, 75
    plot.xaxis.formatter.use_scientific = False
    for number, run in enumerate(runs):
        color = _COLORS[number % len(_COLORS)]
        for tag, width in metrics:
            if tag not in run.scalars:
                continue
            points = event_files.downsample(run.scalars[tag], _POINTS // 2)
            label = " ".join(filter(None, (run.name if len(runs) > 1 else "", tag if len(metrics) > 1 else "")))
            named: dict[str, Any] = {"legend_label": label} if label else {}
            dash = "dashed" if width > 2 and len(runs) > 1 else "solid"
            line = _COLORS[1] if width > 2 and len(runs) == 1 else color
            source = {"x": points.steps, "y": points.values}
            plot.line("x", "y", source=source, color=line, line_width=width, line_dash=dash, **named)
            if len(points.steps) < 100:
                plot.scatter("x", "y", source=source, color=line, size=5, **named)
        for file in run.events[1:]:
            first = min((int(each.steps.min()) for tag, each in file.scalars.items() if tag != "hp_metric"), default=0)
            if first:
                plot.add_layout(Span(location=first, dimension="height", line_color=color, line_dash="dotted"))
    plot.add_tools(HoverTool(tooltips=[("step", "@x{0,0}"), (title, "@y{0.0000e+0}")], mode="vline"))
    if plot.legend:
        plot.legend.click_policy, plot.legend.background_fill_alpha = "hide", 0.7
    return plot


def _timeline(runs: Sequence[Run]) -> Any:
    """Return a figure with a bar for each process and a mark for each checkpoint, over the time of day."""
    from bokeh.models import FactorRange, HoverTool
    from bokeh.plotting import figure

    plot: Any = figure(
        y_range=FactorRange(factors=[run.name for run in reversed(runs)]), x_axis_type="datetime",
        height=90 + 40 * len(runs), sizing_mode="stretch_width",
        x_axis_label="time (UTC)", tools="pan,box_zoom,wheel_zoom,reset,save",
    )  # fmt: skip
    plot.toolbar.logo = None
    for number, run in enumerate(runs):
        files = [file for file in run.events if file.scalars]
        bars = {"left": [1e3 * file.begin for file in files], "right": [1e3 * file.end for file in files],
                "y": [run.name] * len(files)}  # fmt: skip
        plot.hbar(y="y", left="left", right="right", height=0.3, source=bars, color=_COLORS[number % len(_COLORS)])
        marks = {"x": [1e3 * time for _, time in run.checkpoints], "y": [run.name] * len(run.checkpoints),
                 "name": [name for name, _ in run.checkpoints]}  # fmt: skip
        drawn = plot.scatter("x", "y", source=marks, marker="triangle", size=11, color="black", alpha=0.7)
        plot.add_tools(HoverTool(renderers=[drawn], tooltips="@name"))
    return plot


def _settings(runs: Sequence[Run]) -> list[str]:
    """Return a table of the settings that differ from the named configuration, or between the runs."""
    bases = [_base(run) for run in runs]
    parts, rows = ["<h2>Settings</h2>"], []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key) for run in runs]
        named = any(re.search(rf"(^|\s)[+~]*{re.escape(key)}=", run.command) for run in runs)
        changed = any(
            key in base and base[key] != value and "${" not in str(base[key])
            for (_, base), value in zip(bases, values, strict=True)
        )
        if named or changed or any(value != values[0] for value in values):
            before = dict.fromkeys(_text(base[key]) for _, base in bases if key in base and "${" not in str(base[key]))
            rows.append((key, " / ".join(before), *map(_text, values)))
    for run, (name, base) in zip(runs, bases, strict=True):
        if run.command:
            parts.append(f"<p>{escape(run.name)}: <code>{escape(run.command)}</code></p>")
        if not base and run.config:
            parts.append(f"<p>{escape(run.name)}: the configuration {escape(name)} cannot be read for comparison.</p>")
    what = "Settings that differ from the configuration" + (" or between the runs" if len(runs) > 1 else "")
    header = ("key", "configuration", *(run.name for run in runs))
    return [
        *parts,
        f"<p>{what}, or are on the command line:</p>",
        f'<div class="texts">{html_table(header, rows)}</div>',
    ]


def _base(run: Run) -> tuple[str, dict[str, Any]]:
    """Return the name and the values of the configuration that a run started from; {} if it cannot be read."""
    match = re.search(r"--config-name[= ](\S+)", run.command)
    if match is None:
        return "", {}
    try:
        return match[1], flatten(load_plain(match[1]))
    except (UserError, OSError):
        return match[1], {}


def _text(value: Any) -> str:
    return redact_text(str(value))


def _results(runs: Sequence[Run]) -> list[str]:
    """Return the summaries of evaluations that are in the directories of the runs."""
    parts = []
    for run in runs:
        for path in sorted({*run.path.glob("report.json"), *run.path.glob("*/report.json")}):
            from bionemo.evaluation.report import describe_report, read_report  # imports torch, which takes seconds

            try:
                lines = describe_report(read_report(path.parent), path.parent)
            except (UserError, KeyError, TypeError, AttributeError):
                lines = [f"{path} is damaged"]
            parts += [f"<p>{escape(run.name)}</p>", f"<pre>{escape(redact_text(chr(10).join(lines)))}</pre>"]
    return ["<h2>Evaluations</h2>", *parts] if parts else []


def _messages(runs: Sequence[Run]) -> list[str]:
    """Return the messages of the runs: facts about data and hardware, resumed checkpoints, warnings."""
    parts = []
    for run in runs:
        items = "".join(f"<li>{escape(f'{time}  {text}')}</li>" for time, text in run.messages)
        if items:
            parts += [f"<p>{escape(run.name)}</p>", f"<ul>{items}</ul>"]
    return ["<h2>Messages</h2>", *parts] if parts else []


def watch(paths: Sequence[str | Path], output: Path, seconds: int) -> None:
    """Write the page again and again, until it is interrupted.

    Raises:
        UserError: see `render_runs`.
        OSError: if the file cannot be written.
    """
    while True:
        write_page(output, render_runs(paths, refresh=seconds))
        time.sleep(seconds)
