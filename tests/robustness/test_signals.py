# SPDX-License-Identifier: Apache-2.0
"""Signals at any time cause no traceback and no loss of data, and the next start has the same result."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.robustness.commands import COMMANDS, Outcomes, Server
from tests.robustness.scenarios import kept, scenarios

pytestmark = pytest.mark.slow
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
MOMENTS = 10  # for each command and signal


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("command", COMMANDS)
def test_signals_at_random_times(
    command: str,
    number: signal.Signals,
    server: Server,
    model: Path,
    tmp_path: Path,
) -> None:
    scenario = scenarios(model)[command]
    plain = tmp_path / "plain"
    plain.mkdir()
    scenario.prepare(plain)
    begun = time.monotonic()
    assert server.run(scenario.arguments(plain), plain).status == 0
    lasts, expected = time.monotonic() - begun, scenario.result(plain)
    draw = random.Random(f"{command}{number}")
    outcomes = Outcomes()
    for case in range(MOMENTS):
        delay = (case + draw.random()) * lasts / MOMENTS
        directory = tmp_path / "case"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        scenario.prepare(directory)
        first = server.run(scenario.arguments(directory), directory, send=(number, delay))
        problem = first.defect((0, -number, 128 + number))
        again = first
        if not problem and scenario.result(directory) != expected:  # otherwise the signal came after the work
            again = server.run(scenario.arguments(directory), directory)
            problem = again.defect((0,))
        if not problem and scenario.result(directory) != expected:
            problem = "the next start ends with another result"
        if not problem and not kept(directory):
            problem = "a file of the user is lost"
        outcomes.judge(f"{command} {number.name} after {delay:.2f} s", problem, f"{first.console}\n{again.console}")
    outcomes.report()
