# SPDX-License-Identifier: Apache-2.0
"""Run `bionemo evaluate` with one suite."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bionemo.cli.evaluate import main


def arguments(suite: str, model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [str(model), f"--suite={suite}", f"--data={data}", f"--output={output}", "--device=cpu", *more]


def evaluate(suite: str, model: Path, data: Path, output: Path, *more: str) -> dict[str, Any]:
    """Run the command in this process; return the section of the suite, see `read_section`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bionemo evaluate", *arguments(suite, model, data, output, *more)])
        main()
    return read_section(output)


def read_section(output: Path) -> dict[str, Any]:
    """Return the section of the only suite in report.json, without durations."""
    section: dict[str, Any]
    (section,) = json.loads((output / "report.json").read_text())["suites"].values()
    for result in section["results"]:
        del result["seconds"]
    return section
