# SPDX-License-Identifier: Apache-2.0
"""Runs commands in forks of a server, injects faults, and judges how they end."""

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
    """A class of failures.

    Attributes:
        error: errno, or SHORT.
        kinds: the file operations that it can happen to.
        lasting: whether all later operations fail as well, as on a full disk.
    """

    error: int
    kinds: int
    lasting: bool = False


FAULTS = {
    "ENOSPC": Fault(errno.ENOSPC, OPEN_WRITE | WRITE | MKDIR | RESIZE | LINK, lasting=True),
    "EIO": Fault(errno.EIO, OPEN_READ | OPEN_WRITE | READ | WRITE | SYNC | RENAME),
    "EACCES": Fault(errno.EACCES, OPEN_READ | OPEN_WRITE | RENAME | MKDIR | UNLINK | LINK),
    "EINTR": Fault(errno.EINTR, OPEN_READ | OPEN_WRITE | READ | WRITE),
    "short": Fault(SHORT, READ | WRITE),
}


@cache
def _library() -> Path:
    """Compile faults.c once a process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("faults.c needs Linux and a C compiler")
    path = Path(tempfile.mkdtemp()) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


@dataclass
class Result:
    """How a command ended.

    Attributes:
        status: exit status; negative for a signal; None when it hung and was killed.
        console: what it printed.
    """

    status: int | None
    console: str
    calls: int = 0

    @property
    def errors(self) -> list[str]:
        """Lines that tell an error."""
        return [line for line in self.console.splitlines() if line.startswith("error: ")]

    def defect(self, statuses: Sequence[int] = (0, 1)) -> str:
        """Why this is a bad end, "" for a success or an error of one line."""
        if self.status is None:
            return "it hung"
        if "Traceback (most recent call last)" in self.console or "--- Logging error ---" in self.console:
            return "a traceback"
        if re.search(r"this is a defect of bionemo|Segmentation fault|Fatal Python error", self.console):
            return "a defect"
        if self.status not in statuses:
            return f"exit status {self.status}"
        if self.status == 1 and len(self.errors) != 1:
            return f"{len(self.errors)} lines of error"
        return ""


class Server:
    """Runs commands one after the other, each in a fork of a process that has imported everything."""

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
        """Run `module word word ...`.

        Args:
            command: its module and words.
            cwd: where it runs.
            fault: what happens to the n-th operation of its kinds.
            nth: counted from 1; 0 counts the operations alone.
            below: where operations are affected; by default in cwd.
            environment: added to that of the server.
            send: a signal, and the seconds after which the whole process group gets it.
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
    """Collects the bad ends of many cases, so that one test reports all of them."""

    cases: int = 0
    bad: list[str] = field(default_factory=list)

    def judge(self, name: str, problem: str, console: str = "") -> None:
        """Count a case; note its problem if it has one."""
        self.cases += 1
        if problem:
            last = " | ".join(console.strip().splitlines()[-3:])
            self.bad.append(f"{name}: {problem}: {last[-400:]}")

    def report(self) -> None:
        """Fail with all bad ends."""
        assert self.cases
        assert not self.bad, f"{len(self.bad)} of {self.cases} cases ended badly:\n" + "\n".join(self.bad)
