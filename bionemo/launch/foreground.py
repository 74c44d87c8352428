# SPDX-License-Identifier: Apache-2.0
"""Clusters without a queue: a script that runs in the foreground."""

import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import ClusterConfig
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import exports, one_line

_SCRIPT = """\
#!/bin/bash
# {name}: to start it again, bash {file}
set -o pipefail
cd {here} || exit 1
log={log}_$(date +%m%d_%H%M%S).out
{setup}
{{
{commands}
}} 2>&1 | tee -i -a "$log"
"""


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

    program: str | None = None  # program that has to be installed

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    def start(self, job: Job, step: JobStep) -> str:
        """Return the shell command that starts all processes of a step."""
        raise NotImplementedError

    def setup(self, job: Job) -> list[str]:
        """Return shell lines that run before the first step."""
        return []

    def render(self, job: Job) -> dict[Path, str]:
        """Return the configuration and one script."""
        commands = [f"  {self.start(job, step)}" for step in job.steps]
        script = self._script(job)
        text = _SCRIPT.format(
            name=one_line("name", job.name),
            file=script.name,
            here=shlex.quote(str(job.working_directory)),
            log=shlex.quote(str(job.directory / f"log-{job.name}")),
            setup="\n".join([*exports(self.config.env_vars), *self.setup(job)]),
            commands=" &&\n".join(commands),
        )
        return job.records | {script: text}

    def submit(self, job: Job) -> int:
        """Run the script and return its exit status."""
        if self.program and not shutil.which(self.program):
            raise UserError(f"{self.program} was not found: install it, or choose another cluster=")
        with _ignore_interrupts():
            return subprocess.run(["bash", str(self._script(job))], check=False).returncode

    def _script(self, job: Job) -> Path:
        return job.directory / f"{job.name}_submission.sh"
