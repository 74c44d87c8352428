# SPDX-License-Identifier: Apache-2.0
"""Ray: one worker of Ray Train per device, which runs the command of the run (ray_workers.py)."""

from importlib.util import find_spec

from bionemo.common.errors import UserError, install_command
from bionemo.config.schema import RayConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import lines, variable


class Ray(ForegroundCluster):
    """A Ray cluster."""

    def __init__(self, config: RayConfig) -> None:
        super().__init__(config)
        self.config: RayConfig = config

    def start(self, job: Job, step: JobStep) -> str:
        """Return the command that starts the workers."""
        workers = [f"--nodes={step.nodes}", f"--workers-per-node={step.tasks}"]
        workers += [f"--cpus-per-worker={self.config.cpus_per_worker}", f"--accelerator={job.accelerator}"]
        workers += [f"--timeout={self.config.timeout}"]
        workers += [f"--env={variable(name)}={value}" for name, value in self.config.variables.items()]
        ray = [[job.python, "-u", "-m", "bionemo.cluster", "ray"], f"--address={self.config.address}", workers, "--"]
        return lines([*ray, *job.command(step)])

    def submit(self, job: Job) -> int:
        """Check that Ray is installed and run the script."""
        if find_spec("ray") is None:
            raise UserError(f"cluster=ray requires the extra 'ray' of bionemo: {install_command('ray')}")
        return super().submit(job)
