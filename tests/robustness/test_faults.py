# SPDX-License-Identifier: Apache-2.0
"""Every file operation of short runs fails once in every way: one-line error, no data lost, the next start resumes."""

import shutil
from pathlib import Path

import pytest

from tests.robustness.commands import COMMANDS, FAULTS, Outcomes, Server
from tests.robustness.scenarios import Scenario, kept, scenarios

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_operation(command: str, fault: str, server: Server, model: Path, tmp_path: Path) -> None:
    scenario = scenarios(model)[command]
    plain = tmp_path / "plain"
    plain.mkdir()
    scenario.prepare(plain)
    counted = server.run(scenario.arguments(plain), plain, FAULTS[fault])
    expected = scenario.result(plain)
    assert counted.status == 0, counted.console
    assert expected is not None
    assert counted.calls > 5
    outcomes = Outcomes()
    for nth in range(1, counted.calls + 1):
        outcomes.judge(f"{command} {fault} {nth}", *_fails_once(scenario, fault, nth, server, tmp_path, expected))
    outcomes.report()


def _fails_once(
    scenario: Scenario,
    fault: str,
    nth: int,
    server: Server,
    tmp_path: Path,
    expected: object,
) -> tuple[str, str]:
    """Run a command with a failure in its n-th operation, then again without; return any problem, and the output."""
    directory = tmp_path / "case"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    scenario.prepare(directory)
    first = server.run(scenario.arguments(directory), directory, FAULTS[fault], nth)
    if problem := first.defect():
        return problem, first.console
    if not kept(directory):
        return "a file of the user is lost", first.console
    if first.status == 0:
        return ("" if scenario.result(directory) == expected else "success, and another result"), first.console
    again = server.run(scenario.arguments(directory), directory)
    console = f"{first.console}\nagain:\n{again.console}"
    if again.status != 0:
        return "the next start fails", console
    if scenario.result(directory) != expected:
        return "the next start ends with another result", console
    return ("" if kept(directory) else "a file of the user is lost"), console
