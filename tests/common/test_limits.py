# SPDX-License-Identifier: Apache-2.0
"""Limits on open files and on the address space: raised, or one line before the work."""

import subprocess
import sys

import pytest

OPEN_FILES = "from bionemo.common.limits import raise_open_files; raise_open_files(); "
TELL = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


def shell(limit: str, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", f'{limit}; exec "$@"', "bash", *command], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    python = [sys.executable, "-c", OPEN_FILES + TELL]
    assert shell("ulimit -Sn 1024; ulimit -Hn 3000", *python) == (0, "3000 3000\n")
    assert shell("ulimit -Sn 64; ulimit -Hn 3000", *python) == (0, "3000 3000\n")


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            "ulimit -n 64",
            "error: a process can open only 64 files here (`ulimit -Hn`), expected at least 256, and two",
        ),
        ("ulimit -v 2000000", "error: the address space of a process is limited to 1.9 GiB here (`ulimit -v`), expec"),
    ],
)
def test_a_limit_that_is_too_low_is_one_line_before_the_work(limit: str, message: str) -> None:
    mock = ["--config-name=pretrain_esm2_mock", "exp_manager.exp_dir=/nonexistent/run", "trainer.accelerator=cpu"]
    status, output = shell(limit, sys.executable, "-m", "bionemo.pretrain", *mock)
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith(message)
