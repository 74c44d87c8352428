# SPDX-License-Identifier: Apache-2.0
"""Commands that cannot continue end with one line and the right exit status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.common.console import one_line_errors
from bionemo.common.errors import HostError, RankError, UserError

WAITING = """
import atexit, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from bionemo.common.console import one_line_errors

def wait():
    print("here", flush=True)
    time.sleep(3600)

def wait_and_fail():
    try:
        wait()
    except KeyboardInterrupt as error:
        raise AttributeError("as a library's clean-up does") from error

moment = sys.argv[1]
if moment == "at exit":
    atexit.register(wait)
with one_line_errors():
    if moment == "at work":
        wait()
    if moment == "at work, and its clean-up fails":
        wait_and_fail()
if moment == "after the work":
    wait()
"""


@pytest.mark.parametrize(
    ("moment", "expected", "status"),
    [
        ("at work", ["interrupted"], 130),
        ("at work, and its clean-up fails", ["interrupted"], 130),
        ("after the work", ["interrupted"], -signal.SIGINT),
        ("at exit", [], -signal.SIGINT),
    ],
)
def test_an_interrupted_command_prints_one_line(moment: str, expected: list[str], status: int) -> None:
    """The exit status makes a shell stop the script."""
    with subprocess.Popen([sys.executable, "-c", WAITING, moment], stdout=-1, stderr=-1, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "here\n"
        command.send_signal(signal.SIGINT)
        _, output = command.communicate(timeout=300)
    assert output.split() == expected
    assert command.returncode == status


def test_a_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise UserError("what,\n   where")
    assert (end.value.code, capsys.readouterr().err) == (1, "error: what, where\n")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError), one_line_errors():
        raise UserError("what")


@pytest.mark.parametrize(
    ("rank", "local_rank", "printed"),
    [
        (0, 0, [True, True, True]),
        (1, 1, [False, False, True]),
        (2, 0, [False, True, True]),
        (3, 1, [False, False, True]),
    ],
)
def test_which_processes_print_an_error(
    rank: int, local_rank: int, printed: list[bool],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two hosts with two processes each; rank 0 may not have the error of another host or process."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for kind, expected in zip((UserError, HostError, RankError), printed, strict=True):
        with pytest.raises(SystemExit) as end, one_line_errors():
            raise kind("what")
        assert (end.value.code, capsys.readouterr().err) == (1, "error: what\n" if expected else "")


def test_a_rank_that_is_not_an_integer_is_reported_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "abc")
    with pytest.raises(SystemExit) as end, one_line_errors():
        pytest.fail("begun")
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert error.startswith("error: RANK is 'abc': expected an integer")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "pretrain",
        "finetune",
        "predict",
        "preprocess",
        "launch",
        "cli plan",
        "cluster check",
        "cli checkpoint inspect x",
    ],
)
def test_a_deleted_working_directory_is_one_line_for_every_command(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    package, *arguments = command.split()
    script = f"rmdir {gone}; exec {sys.executable} -m bionemo.{package} {' '.join(arguments)}"
    done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: the working directory cannot be found (No such file or directory): change to an existing directory "
        "with `cd`\n"
    )


def test_a_missing_home_directory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens in a container that runs with a user id without an account."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(SystemExit), one_line_errors():
        pytest.fail("begun")
    assert capsys.readouterr().err == (
        "error: HOME is not set and the user has no home directory: set HOME to a directory to write to\n"
    )
