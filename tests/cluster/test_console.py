# SPDX-License-Identifier: Apache-2.0
"""How a command ends that cannot go on."""

import signal
import subprocess
import sys

import pytest

from bionemo.cluster.console import one_line_errors
from bionemo.errors import UserError

WAITING = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from bionemo.cluster.console import one_line_errors

with one_line_errors():
    print("here", flush=True)
    time.sleep(60)
"""


def test_an_interrupted_command_says_so_in_one_line() -> None:
    """With the status that a shell expects, so that what follows in a script is not begun."""
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=-1, stderr=-1, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "here\n"
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=30)
    assert said.split() == ["interrupted"]
    assert command.returncode == 130


def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise UserError("what,\n   where")
    assert (end.value.code, capsys.readouterr().err) == (1, "error: what, where\n")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError), one_line_errors():
        raise UserError("what")
