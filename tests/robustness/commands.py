# SPDX-License-Identifier: Apache-2.0
"""Run commands in forks of a server, inject faults, and check how they end."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

OPEN_READ, OPEN_WRITE, READ, WRITE, SYNC, RENAME, MKDIR, UNLINK, RESIZE, LINK = (1 << bit for bit in range(10))
SHORT = -1  # no error: half of the bytes are transferred
TIMEOUT = 120.0  # seconds; a command takes three


@dataclass(frozen=True)
class Fault:
    """A class of failures."""

    error: int  # errno, or SHORT
    kinds: int  # file operations that can fail this way
    lasting: bool = False  # whether all later operations fail as well, like on a full disk


FAULTS = {
    "ENOSPC": Fault(errno.ENOSPC, OPEN_WRITE | WRITE | MKDIR | RESIZE | LINK, lasting=True),
    "EIO": Fault(errno.EIO, OPEN_READ | OPEN_WRITE | READ | WRITE | SYNC | RENAME),
    "EACCES": Fault(errno.EACCES, OPEN_READ | OPEN_WRITE | RENAME | MKDIR | UNLINK | LINK),
    "EINTR": Fault(errno.EINTR, OPEN_READ | OPEN_WRITE | READ | WRITE),
    "short": Fault(SHORT, READ | WRITE),
}


@cache
def _library() -> Path:
    """Compile faults.c once per process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("faults.c needs Linux and a C compiler")
    path = Path(tempfile.mkdtemp()) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


@dataclass
class Result:
    """Result of a command."""

    status: int | None  # exit status; negative for a signal; None if it hung and was killed
    console: str  # its output
    calls: int = 0

    @property
    def errors(self) -> list[str]:
        """Return the lines that report an error."""
        return [line for line in self.console.splitlines() if line.startswith("error: ")]

    def defect(self, statuses: Sequence[int] = (0, 1)) -> str:
        """Return why this end is invalid, or "" for a success or a one-line error."""
        if self.status is None:
            return "it hung"
        if "Traceback (most recent call last)" in self.console or "--- Logging error ---" in self.console:
            return "a traceback"
        if re.search(r"this is a bug in bionemo|Segmentation fault|Fatal Python error", self.console):
            return "a defect"
        if self.status not in statuses:
            return f"exit status {self.status}"
        if self.status == 1 and len(self.errors) != 1:
            return f"{len(self.errors)} lines of error"
        return ""


class Server:
    """Runs commands sequentially, each in a fork of a process that has imported all modules."""

    def __init__(self) -> None:
        environment = os.environ | {"LD_PRELOAD": str(_library()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        assert self._answer() == {"ready": True}

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(
        self, command: Sequence[str], cwd: Path, fault: Fault | None = None, nth: int = 0,
        below: Path | None = None, environment: Mapping[str, str] | None = None, send: tuple[int, float] | None = None,
    ) -> Result:  # fmt: skip
        """Run `module argument argument ...`.

        Args:
            command: module and arguments.
            cwd: working directory.
            fault: failure of the n-th operation of its kinds.
            nth: number of the operation, from 1; 0 only counts the operations.
            below: directory whose operations are affected; by default `cwd`.
            environment: variables added to those of the server.
            send: signal for the process group, and the seconds until it is sent.
        """
        console, calls = (cwd.with_name(f"{cwd.name}.{name}") for name in ("console", "calls"))
        console.write_text("")  # a command may be killed before it opens the file
        request: dict[str, Any] = {
            "command": list(command), "cwd": str(cwd), "console": str(console), "timeout": TIMEOUT,
            "environment": dict(environment or {}), "calls": str(calls),
        }  # fmt: skip
        if fault is not None:
            request["fault"] = {
                "below": str(below or cwd), "kinds": fault.kinds, "nth": nth, "error": fault.error,
                "lasting": int(fault.lasting),
            }  # fmt: skip
        if send is not None:
            request["signal"] = send
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        counted = int(calls.read_text() or 0) if calls.exists() else 0
        return Result(answer["status"], console.read_text(errors="replace"), counted)

    def end(self) -> None:
        """Stop the server."""
        self._process.kill()
        self._process.wait()


@dataclass
class Outcomes:
    """Collects the problems of many cases, so that one test reports all of them."""

    cases: int = 0
    bad: list[str] = field(default_factory=list)

    def judge(self, name: str, problem: str, console: str = "") -> None:
        """Count a case; record its problem if it has one."""
        self.cases += 1
        if problem:
            last = " | ".join(console.strip().splitlines()[-3:])
            self.bad.append(f"{name}: {problem}: {last[-400:]}")

    def report(self) -> None:
        """Fail with all recorded problems."""
        assert self.cases
        assert not self.bad, f"{len(self.bad)} of {self.cases} cases ended badly:\n" + "\n".join(self.bad)


COMMANDS = ["pretrain", "predict", "preprocess", "finetune"]
