# SPDX-License-Identifier: Apache-2.0
"""Write an HTML page about training runs."""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError

_SECONDS = 30  # between two updates


def main() -> None:
    """Run `bionemo report`."""
    with one_line_errors():
        report(_parser().parse_args())


def report(options: Namespace) -> None:
    """Write the page, or a plot; with `watch`, write it again and again until the command is interrupted.

    Raises:
        UserError: if a directory is not that of a run, the output exists and is no report, or a library is missing.
        OSError: if the output cannot be written.
    """
    from bionemo.common.figures import FORMATS  # imports NumPy
    from bionemo.common.files import write_atomic
    from bionemo.evaluation.html import write_page
    from bionemo.evaluation.run_report import plot_losses, render_runs

    suffix = options.output.suffix.lower()
    if suffix in FORMATS:
        if options.watch:
            raise UserError("--watch updates a page: leave it out, or give --output the extension .html")
        if options.output.exists():
            raise UserError(f"{options.output} exists: move it away, or choose another name for --output")
        write_atomic(options.output, plot_losses(options.runs, suffix))
        print(f"loss curves: {options.output}")
        return
    refresh = _SECONDS if options.watch else None
    write_page(options.output, render_runs(options.runs, refresh))
    print(f"report: {options.output}", flush=True)
    while refresh:
        time.sleep(refresh)
        write_page(options.output, render_runs(options.runs, refresh))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "bionemo report",
        description="Write one HTML page about training runs, which needs no network: curves, starts, "
        "settings, evaluations and the end of the log. Several runs are shown side by side.",
        epilog="In a notebook: from bionemo.evaluation.run_report import RunReport; RunReport('RUN')",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, with config.yaml")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="default: report.html; .svg, .pdf or .png: only the loss curves, for a paper",
    )
    parser.add_argument("--watch", action="store_true", help="update the page every 30 seconds, until Ctrl-C")
    return parser
