# SPDX-License-Identifier: Apache-2.0
"""Clusters without a queue: a script that runs in the foreground."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import ClusterConfig
from bionemo.launch.job import Job
from bionemo.launch.shell import render


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Continue to wait after Ctrl-C, which the terminal also sends to the run; the run saves and exits."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # child processes ignore it too
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ForegroundCluster:
    """Base class: one command per step, in a script that runs in the foreground."""

    template: str
    program: str | None = None  # program that has to be installed

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    def render(self, job: Job) -> dict[Path, str]:
        """Return the configuration and one script."""
        script = self._script(job)
        return job.records | {script: render(self.template, job=job, cluster=self.config, script=script)}

    def submit(self, job: Job) -> int:
        """Run the script and return its exit status."""
        if self.program and not shutil.which(self.program):
            raise UserError(f"{self.program} was not found: install it, or choose another cluster=")
        with _ignore_interrupts():
            return subprocess.run(["bash", str(self._script(job))], check=False).returncode

    def _script(self, job: Job) -> Path:
        return job.directory / f"{job.name}_submission.sh"
