# SPDX-License-Identifier: Apache-2.0
"""Ray: one worker of Ray Train per device, which runs the command of the run (ray_workers.py)."""

import os
from importlib.util import find_spec
from pathlib import Path

from bionemo.common.errors import UserError, install_command
from bionemo.config.schema import RayConfig
from bionemo.launch.foreground import ForegroundCluster
from bionemo.launch.job import Job


def set_token() -> None:
    """Use the token of scripts/start_ray_cluster.sh, if there is one. Ray reads this when it is imported."""
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_TOKEN" in os.environ or token.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class Ray(ForegroundCluster):
    """A Ray cluster."""

    template = "ray.sh.j2"
    config: RayConfig

    def submit(self, job: Job) -> int:
        """Check that Ray is installed and run the script."""
        if find_spec("ray") is None:
            raise UserError(f"cluster=ray requires the extra 'ray' of bionemo: {install_command('ray')}")
        return super().submit(job)
