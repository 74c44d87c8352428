# SPDX-License-Identifier: Apache-2.0
"""Run a command in every worker of a Ray cluster.

Every worker starts the command in a child process, because a run handles signals, forks data workers and reports its
result by an exit status.
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
_RESPONSE_TIMEOUT = 20  # seconds to wait for a response of the cluster
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RayJob:
    """A command to run on a Ray cluster."""

    command: list[str]  # arguments of the command, the same for every process
    environment: dict[str, str]  # additional environment variables
    directory: str  # working directory
    nodes: int  # number of nodes
    workers: int  # processes per node
    cpus: int  # cores per process
    accelerator: str  # `trainer.accelerator`; `auto` uses GPUs if the cluster has any


def run_on_ray(job: RayJob, address: str, timeout: float) -> None:
    """Run a command in every process of a run, and wait for all processes.

    Args:
        job: the command.
        address: address of the head node, HOST:PORT; `auto` uses the cluster of this machine.
        timeout: seconds to wait until the cluster is reachable and large enough.

    Raises:
        UserError: if the cluster cannot be reached or is too small, or a process fails.
    """
    until = time.monotonic() + timeout
    while not _is_reachable(address):
        if time.monotonic() > until:
            raise UserError(
                f"no Ray cluster responded at {address} within {timeout:.0f} s: start one with "
                "scripts/start_ray_cluster.sh"
            )
        time.sleep(_POLL_SECONDS)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    console = _Console()
    try:
        while missing := _missing_resources(job):
            if time.monotonic() > until:
                raise UserError(f"the Ray cluster {missing}")
            time.sleep(_POLL_SECONDS)
        gpus = _uses_gpus(job)
        resources = {"CPU": job.cpus} | ({"GPU": 1} if gpus else {})
        TorchTrainer(
            _process,
            train_loop_config={**asdict(job), "console": console.address},
            # Ray uses this process group only to transfer one address; gloo needs no GPU memory
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=job.nodes * job.workers, use_gpu=gpus, resources_per_worker=resources,
                placement_strategy="SPREAD" if job.nodes > 1 else "PACK",
            ),
            run_config=RunConfig(storage_path=None),
        ).fit()  # fmt: skip
    except ray.train.TrainingFailedError as error:
        raise UserError(f"the run failed: {_last_error_line(error)}") from error
    finally:
        console.end()
        ray.shutdown()


class _Console(socketserver.ThreadingTCPServer):
    """Prints the output of the processes line by line, without messages of Ray.

    Attributes:
        address: address that the processes write to.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("", 0), _Copy)
        self.address = ray.util.get_node_ip_address(), self.server_address[1]
        self.ended: list[threading.Event] = []  # one for each process
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Print the remaining output and stop."""
        for each in self.ended:
            each.wait(_RESPONSE_TIMEOUT / 4)
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


def _is_reachable(address: str) -> bool:
    """Return whether a cluster responds; checked in another process, because Ray itself retries for minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    command += [] if address == "auto" else ["--address", address]
    try:
        return subprocess.run(command, capture_output=True, timeout=_RESPONSE_TIMEOUT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _uses_gpus(job: RayJob) -> bool:
    available = ray.cluster_resources().get("GPU", 0) > 0
    return job.accelerator in ("gpu", "cuda") or (job.accelerator == "auto" and available)


def _missing_resources(job: RayJob) -> str:
    """Return which resource the cluster lacks, or an empty string; Ray itself would wait for it without limit."""
    has = ray.cluster_resources()
    processes = job.nodes * job.workers
    machines = sum(bool(node["Alive"]) for node in ray.nodes())
    wanted = {"machines": (job.nodes, machines), "cores": (processes * job.cpus, has.get("CPU", 0))}
    if _uses_gpus(job):
        wanted["GPUs"] = (processes, has.get("GPU", 0))
    for what, (needed, available) in wanted.items():
        if available < needed:
            layout = f"trainer.num_nodes={job.nodes} x trainer.devices={job.workers}"
            return f"has {available:.0f} {what}, but {layout} needs {needed}"
    return ""


def _process(config: dict[str, Any]) -> None:
    """Run the command as one of the processes, with the rank that Ray has set."""
    with socket.create_server(("", 0)) as server:
        rendezvous: list[Any] = [(ray.util.get_node_ip_address(), server.getsockname()[1])]
    dist.broadcast_object_list(rendezvous)
    address, port = rendezvous[0]
    environment = os.environ | config["environment"]
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "BIONEMO_LAUNCHER": "Ray"}
    with socket.create_connection(config["console"]) as console:
        output = console.fileno()
        status = subprocess.run(
            config["command"], env=environment, cwd=config["directory"], stdout=output, stderr=output,
            preexec_fn=_terminate_with_parent, check=False,
        ).returncode  # fmt: skip
    if status:
        raise RuntimeError(f"rank {environment['RANK']} ended with status {status}")


def _terminate_with_parent() -> None:
    """Terminate this process when the worker of Ray ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _last_error_line(error: BaseException) -> str:
    """Return the last line of the error of the first failed worker."""
    failures = getattr(error, "worker_failures", None) or {}
    first = failures[min(failures)] if failures else error
    return str(getattr(first, "_base_exc", first)).strip().splitlines()[-1]
