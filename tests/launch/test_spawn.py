# SPDX-License-Identifier: Apache-2.0
"""Every failure of a worker that this process has started becomes one error line that names the worker."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bionemo.common.console import BUG_MESSAGE

PROGRAM = """
import os, signal, sys, time
from bionemo.common.console import one_line_errors
from bionemo.common.errors import RankError, UserError
from bionemo.launch.spawn import spawn_local_workers

with one_line_errors():
    if "RANK" not in os.environ:
        with spawn_local_workers(3) as check_workers:
            while "wait" not in sys.argv:
                check_workers()
                time.sleep(0.05)
    elif os.environ["RANK"] == "2":
        exec(sys.argv[1])
    elif "wait" not in sys.argv:
        time.sleep(60)
"""
FAILURES = [  # a statement, the end of the error line, whether a traceback is printed before it
    ("raise UserError('x' * 100_000)", r": x{100000}", False),  # more than a pipe holds
    ("raise RankError('what: where: fix it')", r": what: where: fix it", False),
    ("raise ValueError('in two\\nlines')", f": {re.escape(BUG_MESSAGE)}", True),
    ("sys.exit(1)", r" exited with status 1: check its messages above", False),
    ("os.kill(os.getpid(), signal.SIGKILL)", r" was killed by SIGKILL: check the memory of this machine", False),
    ("os.kill(os.getpid(), 40)", r" was killed by signal 40: check the memory of this machine", False),  # has no name
    ("wait; os._exit(3)", r" exited with status 3: check its messages above", False),
]


@pytest.mark.parametrize(("failure", "expected", "is_defect"), FAILURES, ids=[each for each, *_ in FAILURES])
def test_a_failed_worker_is_named_in_one_line(failure: str, expected: str, is_defect: bool, tmp_path: Path) -> None:
    program, start = tmp_path / "program.py", time.monotonic()
    program.write_text(PROGRAM)
    statement = failure.removeprefix("wait; ")
    command = [sys.executable, program, statement, *["wait"] * (statement != failure)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    *others, error = done.stderr.splitlines()
    assert done.returncode == 1
    assert re.fullmatch(rf"error: rank 2 \(process \d+\){expected}", error)
    assert others == [] if not is_defect else others[0].startswith("Traceback")
    assert done.stderr.count("error: ") == 1
    assert time.monotonic() - start < 50  # the other worker does not finish its work


def test_workers_that_succeed_cause_no_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, "print('from 2')", "wait"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "from 2\n", "")
