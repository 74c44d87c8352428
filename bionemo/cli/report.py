# SPDX-License-Identifier: Apache-2.0
"""Write an HTML page about training runs."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from bionemo.common.console import one_line_errors

_SECONDS = 30  # between two updates


def main() -> None:
    """Run `bionemo report`."""
    with one_line_errors():
        report(_parser().parse_args())


def report(options: Namespace) -> None:
    """Write the page; with `watch`, write it again and again until the command is interrupted.

    Raises:
        UserError: if a directory is not that of a run, the output exists and is no report, or Bokeh is not installed.
        OSError: if the page cannot be written.
    """
    from bionemo.evaluation.html import write_page
    from bionemo.evaluation.run_report import render_runs, watch

    if options.watch:
        print(f"{options.output} is updated every {_SECONDS} seconds; press Ctrl-C to end", flush=True)
        watch(options.runs, options.output, _SECONDS)
    write_page(options.output, render_runs(options.runs))
    print(f"report: {options.output}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo report",
        description="Write one HTML page about training runs, which needs no network: curves, processes and "
        "checkpoints, settings that differ, evaluations and messages. Several runs are shown side by side.",
        epilog="In a notebook: from bionemo.evaluation.run_report import RunReport; RunReport('RUN')",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, with config.yaml")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    parser.add_argument("--watch", action="store_true", help="update the page during a run")
    return parser
