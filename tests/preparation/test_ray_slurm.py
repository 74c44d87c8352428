# SPDX-License-Identifier: Apache-2.0
"""A preparation on the Ray cluster of a Slurm job on two hosts writes the bytes of a preparation in one process."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.hosts import AVAILABLE, two_hosts
from tests.launch.mini_slurm import MISSING, mini_slurm
from tests.preparation.test_ray import OPTIONS, local, place, sums

__all__ = ["place"]
pytestmark = pytest.mark.skipif(
    not (find_spec("ray") and AVAILABLE and not MISSING), reason="needs Ray, root and Slurm"
)
_JOB = """\
#!/bin/sh
srun --ntasks-per-node=1 bash {root}/scripts/start_ray_cluster.sh --num-cpus=2 &
exec python -m bionemo.preprocess source=x.fasta {options} output=slurm engine=ray
"""


@pytest.mark.slow
def test_bytes(place: Path) -> None:
    (place / "job.sh").write_text(_JOB.format(root=ROOT, options=" ".join(OPTIONS)))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ray = {"RAY_AUTH_TOKEN_PATH": str(place / "slurm-token"), "RAY_TMPDIR": "/tmp"}
    with two_hosts(place) as hosts, mini_slurm(place / "cluster", hosts=hosts) as slurm:
        environment = {**os.environ, **slurm, **ray, "PATH": f"{path}:/usr/sbin", "PYTHONPATH": str(ROOT)}
        command = ["timeout", "200", "sbatch", "--wait", "--nodes=2", "--output=job.log", "job.sh"]
        status = subprocess.run(command, cwd=place, env=environment, check=False).returncode
    assert status == 0, (place / "job.log").read_text()
    assert sums(place / "slurm") == local(place)
