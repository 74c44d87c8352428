# SPDX-License-Identifier: Apache-2.0
"""Clusters that are reached from this machine at once: a script that runs in the foreground, and is awaited."""

import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.schema import ClusterConfig
from bionemo.launch.job import Job, Stage
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
def _interrupts_left_to_the_run() -> Iterator[None]:
    """Wait on after Ctrl-C, which the terminal sends to the run as well: it saves, and then ends."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # what it starts ignores it too
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Here:
    """Starts every stage with a command of its own.

    Args:
        config: `cluster`.
    """

    program: str | None = None  # what has to be on the path

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    def start(self, job: Job, stage: Stage) -> str:
        """The command that starts a stage on all its processes."""
        raise NotImplementedError

    def setup(self, job: Job) -> list[str]:
        """Lines of shell before the first stage."""
        return []

    def render(self, job: Job) -> dict[Path, str]:
        """See `Cluster`: what was asked for, and one script."""
        commands = [f"  {self.start(job, stage)}" for stage in job.stages]
        script = self._script(job)
        text = _SCRIPT.format(
            name=one_line("name", job.name),
            file=script.name,
            here=shlex.quote(str(job.here)),
            log=shlex.quote(str(job.directory / f"log-{job.name}")),
            setup="\n".join([*exports(self.config.env_vars), *self.setup(job)]),
            commands=" &&\n".join(commands),
        )
        return job.records | {script: text}

    def submit(self, job: Job) -> int:
        """See `Cluster`: run the script."""
        if self.program and not shutil.which(self.program):
            raise UserError(f"there is no {self.program} here: install it, or choose another cluster=")
        with _interrupts_left_to_the_run():
            return subprocess.run(["bash", str(self._script(job))], check=False).returncode

    def _script(self, job: Job) -> Path:
        return job.directory / f"{job.name}_submission.sh"
