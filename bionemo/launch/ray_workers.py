# SPDX-License-Identifier: Apache-2.0
"""Ray places the processes of a run, and each starts the run's own command, which trains as under any launcher.

That is a process of its own and no function inside Ray's worker, since a run answers signals, forks workers for its
data, and says by its exit status how it ended.
"""

import ctypes
import logging
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from bionemo.common.errors import UserError

_PR_SET_PDEATHSIG = 1
_ANSWER = 20  # seconds that a cluster has to say that it is there
_POLL = 1.0


@dataclass(frozen=True)
class Placed:
    """What runs on a Ray cluster, and where.

    Attributes:
        command: its words, the same for every process.
        environment: set for it.
        directory: that it runs in.
        nodes: machines.
        workers: processes on each.
        cpus: cores that a process is given.
        accelerator: `trainer.accelerator`; auto takes GPUs where the cluster has any.
    """

    command: list[str]
    environment: dict[str, str]
    directory: str
    nodes: int
    workers: int
    cpus: int
    accelerator: str


def run_on_ray(placed: Placed, address: str, patience: float) -> None:
    """Start a command in every process of a run, and await them all.

    Args:
        placed: the command.
        address: of the head of the cluster, HOST:PORT; `auto`: the cluster that this machine is of.
        patience: seconds that the cluster, which may have been started just now, has to be large enough.

    Raises:
        UserError: when the cluster cannot be reached, stays smaller than asked for, or a process fails.
    """
    until = time.monotonic() + patience
    while not _answers(address):
        if time.monotonic() > until:
            raise UserError(
                f"no Ray cluster answers at {address} within {patience:.0f} s: scripts/start_ray_cluster.sh starts one"
            )
        time.sleep(_POLL)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    console = _Console()
    try:
        while lacks := _lacks(placed):
            if time.monotonic() > until:
                raise UserError(f"the Ray cluster {lacks}")
            time.sleep(_POLL)
        gpus = _uses_gpus(placed)
        resources = {"CPU": placed.cpus} | ({"GPU": 1} if gpus else {})
        TorchTrainer(
            _process,
            train_loop_config={**asdict(placed), "console": console.address},
            # its own process group carries nothing but an address: gloo takes no memory of a GPU
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=placed.nodes * placed.workers, use_gpu=gpus, resources_per_worker=resources,
                placement_strategy="SPREAD" if placed.nodes > 1 else "PACK",
            ),
            run_config=RunConfig(storage_path=None),
        ).fit()  # fmt: skip
    except ray.train.TrainingFailedError as error:
        raise UserError(f"the run failed: {_reason(error)}") from error
    finally:
        console.end()
        ray.shutdown()


class _Console(socketserver.ThreadingTCPServer):
    """Shows what the processes print, line by line, and nothing of what Ray says about itself.

    Attributes:
        address: where their output goes.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("", 0), _Copy)
        self.address = ray.util.get_node_ip_address(), self.server_address[1]
        self.ended: list[threading.Event] = []  # one for each process
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Let those that have ended be shown to their end."""
        for each in self.ended:
            each.wait(_ANSWER / 4)
        self.shutdown()
        self.server_close()


class _Copy(socketserver.StreamRequestHandler):
    server: _Console

    def handle(self) -> None:
        """Copy lines until the process has ended."""
        ended = threading.Event()
        self.server.ended.append(ended)
        for line in self.rfile:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
        ended.set()


def _answers(address: str) -> bool:
    """Whether there is a cluster; asked in another process, since Ray itself would try for minutes."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    words += [] if address == "auto" else ["--address", address]
    try:
        return subprocess.run(words, capture_output=True, timeout=_ANSWER, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _uses_gpus(placed: Placed) -> bool:
    asked, there = placed.accelerator, ray.cluster_resources().get("GPU", 0) > 0
    return asked in ("gpu", "cuda") or (asked == "auto" and there)


def _lacks(placed: Placed) -> str:
    """What there is too little of, if anything; Ray itself would wait for more to come, for ever."""
    has = ray.cluster_resources()
    processes = placed.nodes * placed.workers
    machines = sum(bool(node["Alive"]) for node in ray.nodes())
    wanted = {"machines": (placed.nodes, machines), "cores": (processes * placed.cpus, has.get("CPU", 0))}
    if _uses_gpus(placed):
        wanted["GPUs"] = (processes, has.get("GPU", 0))
    for what, (needed, there) in wanted.items():
        if there < needed:
            layout = f"trainer.num_nodes={placed.nodes} x trainer.devices={placed.workers}"
            return f"has {there:.0f} {what}, and {layout} needs {needed}"
    return ""


def _process(config: dict[str, Any]) -> None:
    """Run the command as one of the processes; Ray's variables say which."""
    where: list[Any] = [_free_address()]
    dist.broadcast_object_list(where)
    address, port = where[0]
    environment = os.environ | config["environment"]
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "BIONEMO_LAUNCHER": "Ray"}
    with socket.create_connection(config["console"]) as console:
        output = console.fileno()
        status = subprocess.run(
            config["command"], env=environment, cwd=config["directory"], stdout=output, stderr=output,
            preexec_fn=_end_with_parent, check=False,
        ).returncode  # fmt: skip
    if status:
        raise RuntimeError(f"rank {environment['RANK']} ended with status {status}")


def _free_address() -> tuple[str, int]:
    with socket.create_server(("", 0)) as server:
        return ray.util.get_node_ip_address(), server.getsockname()[1]


def _end_with_parent() -> None:
    """Let no process of a run outlive Ray's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(error: BaseException) -> str:
    """The shortest that says it: what the first failed worker raised."""
    failures = getattr(error, "worker_failures", None) or {}
    first = failures[min(failures)] if failures else error
    return str(getattr(first, "_base_exc", first)).strip().splitlines()[-1]
