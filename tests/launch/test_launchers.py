"""A run on two nodes with two processes each equals four local processes bitwise with every launcher."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.hosts import AVAILABLE, address, ray_cluster
from tests.launch.mini_slurm import MISSING, mini_slurm
from tests.support.runs import fingerprint, logged, run_on_ranks, tiny

pytestmark = pytest.mark.slow
NAME = "--config-name=pretrain_esm2_8M"
# starts a process of mpirun for another host on this machine, under that host's name
AGENT = """#!/bin/sh
host=$1; shift
exec unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$host" "$*"
"""


def overrides(directory: Path, nodes: int = 2, devices: int = 2) -> list[str]:
    sizes = [f"trainer.num_nodes={nodes}", f"trainer.devices={devices}", "model.hidden_dropout=0.1"]
    return [NAME, *tiny(*sizes, f"exp_manager.exp_dir={directory}", "name=esm")]


def call(command: list[str], directory: Path, **environment: str) -> None:
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=full, cwd=directory, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def bcprun(place: Path) -> Path:
    line = " ".join(
        f"'{argument}'" for argument in [sys.executable, "-m", "bionemo.pretrain", *overrides(place / "run")]
    )
    call([str(ROOT / "scripts" / "bcprun"), "--nnodes", "2", "--npernode", "2", "--cmd", line], place)
    return place / "run"


def torchrun(place: Path) -> Path:
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port()}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={node}", "-m", "bionemo.pretrain",
             *overrides(place / "run")],
            cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for node in range(2)
    ]  # fmt: skip
    assert [agent.wait(300) for agent in agents] == [0, 0]
    return place / "run"


def launched(place: Path, *more: str, nodes: int = 2, devices: int = 2, **environment: str) -> Path:
    command = [sys.executable, "-m", "bionemo.launch", *overrides(place / "launched", nodes, devices), *more]
    call(command, place, **environment)
    return place / "launched" / "results"


def mpi(place: Path, options: list[str], **environment: str) -> Path:
    """Start the run on this host and on one that the agent simulates."""
    agent = place / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    hosts = place / "hosts"
    hosts.write_text(f"{socket.gethostname()} slots=2\nnode2 slots=2\n")
    given = ",".join(option.format(agent=agent) for option in options)
    return launched(
        place, "cluster=mpi", f"cluster.hostfile={hosts}", f"cluster.mpirun_args=[{given}]",
        "cluster.env_vars={GLOO_SOCKET_IFNAME: lo}", MASTER_ADDR="127.0.0.1", **environment,
    )  # fmt: skip


def mpirun(place: Path) -> Path:
    return mpi(
        place, ["--allow-run-as-root", "--mca", "plm_rsh_agent", "{agent}", "--mca", "plm_rsh_no_tree_spawn", "'1'"]
    )


def hydra(place: Path, package: str) -> Path:
    """Install MPICH or Intel MPI from PyPI; both start processes with a program named Hydra."""
    call([sys.executable, "-m", "venv", str(place / "venv")], place)
    call([str(place / "venv" / "bin" / "pip"), "install", "--quiet", package], place)
    path = f"{place / 'venv' / 'bin'}:{os.environ['PATH']}"
    return mpi(place, ["-launcher", "rsh", "-launcher-exec", "{agent}"], PATH=path)


def slurm(place: Path) -> Path:
    with mini_slurm(place / "slurm") as environment:
        results = launched(place, "cluster=bcm", MASTER_ADDR="127.0.0.1", **environment)
        waits = ["srun", "--dependency=singleton", "--job-name=nemo-megatron-esm", "true"]  # for the job of this name
        call(waits, place, **environment)
    return results


def ray(place: Path) -> Path:
    with ray_cluster(place) as (hosts, environment, _):
        where = ["cluster=ray", f"cluster.address={address(1)}:6379"]
        command = [sys.executable, "-m", "bionemo.launch", *overrides(place / "launched"), *where]
        call([*hosts[0], *command], place, **environment)
    return place / "launched" / "results"


LAUNCHERS: dict[str, tuple[Callable[[Path], Path], object]] = {
    "bcprun": (bcprun, True),
    "torchrun": (torchrun, True),
    "mpirun": (mpirun, shutil.which("mpirun") and os.geteuid() == 0),
    "mpich": (partial(hydra, package="mpich"), os.geteuid() == 0),
    "intel_mpi": (partial(hydra, package="impi-rt"), os.geteuid() == 0),
    "slurm": (slurm, not MISSING),
    "ray": (ray, find_spec("ray") and AVAILABLE),
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("local") / "run"
    ended = run_on_ranks(directory, "model.hidden_dropout=0.1", ranks=4)
    assert [status for status, _ in ended] == [0] * 4, ended
    return directory


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_losses_and_weights_are_those_of_four_local_processes(launcher: str, local: Path, tmp_path: Path) -> None:
    start, available = LAUNCHERS[launcher]
    if not available:
        pytest.skip(f"{launcher} is not installed, or its trial needs root")
    directory = start(tmp_path)
    for key in ("reduced_train_loss", "val_loss", "grad_norm"):
        assert logged(directory, key) == logged(local, key)
    assert len(logged(local, "reduced_train_loss")) == 8
    assert fingerprint(directory) == fingerprint(local)
