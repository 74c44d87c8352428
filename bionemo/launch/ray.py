# SPDX-License-Identifier: Apache-2.0
"""Ray: one worker of Ray Train per device, which runs the command of the run (ray_workers.py)."""

from importlib.util import find_spec

from bionemo.common.errors import UserError, install_command
from bionemo.config.schema import RayConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job


class Ray(ForegroundCluster):
    """A Ray cluster."""

    template = "ray.sh.j2"
    config: RayConfig

    def submit(self, job: Job) -> int:
        """Check that Ray is installed and run the script."""
        if find_spec("ray") is None:
            raise UserError(f"cluster=ray requires the extra 'ray' of bionemo: {install_command('ray')}")
        return super().submit(job)
