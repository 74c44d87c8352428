# SPDX-License-Identifier: Apache-2.0
"""Test the connections between the processes of a run with one all-reduce (`bionemo cluster check`)."""

import json
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from bionemo.common.errors import RankError, UserError
from bionemo.common.launcher_environment import Process, check_master_address

_COLUMNS = ("rank", "node", "local", "host", "process", "device", "started by")


def check(process: Process, cpu: bool, timeout: float) -> None:
    """Print a table of all processes, then sum a number over them.

    Uses gloo between CPUs if `cpu`, even if there are GPUs. All processes have to connect within `timeout` seconds.

    Raises:
        UserError: if a process does not connect or has no GPU, all-reduce fails, or the sum is wrong.
    """
    if (size := process.world_size) is None:
        raise UserError(f"WORLD_SIZE is not set ({process.launcher}): set it to the number of processes")
    gpu = torch.cuda.is_available() and not cpu
    if gpu:
        process.check_gpu(torch.cuda.device_count())
    device = torch.device("cuda", process.local_rank) if gpu else torch.device("cpu")
    store = _connect(process, size, timeout)
    _list_processes(process, size, store, device, timeout)
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    total = torch.tensor([process.rank + 1], device=device)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=process.rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        dist.all_reduce(total)
    except (dist.DistError, RuntimeError) as error:
        raise RankError(
            f"rank {process.rank} on {socket.gethostname()}: all-reduce failed "
            f"({str(error).strip().splitlines()[0]}): see the messages of the other processes"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(total) != size * (size + 1) // 2:
        raise UserError(f"rank {process.rank} on {socket.gethostname()}: the sum over all ranks is wrong")
    if process.rank == 0:
        print(f"all-reduce over {size} processes with {backend}: the sum is correct")


def _connect(process: Process, size: int, timeout: float) -> dist.TCPStore:
    check_master_address(process)
    first = process.rank == 0 and process.launcher != "torchrun"  # torchrun already runs a store at this port
    try:
        return dist.TCPStore(
            process.address, process.port, size, first, timedelta(seconds=timeout), wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"rank {process.rank} on {socket.gethostname()} cannot connect to rank 0 at {process.address}:"
            f"{process.port} within {timeout:.0f} s: check that the host name resolves and that the port is open "
            f"({str(error).strip().splitlines()[0]})"
        ) from error


def _list_processes(process: Process, size: int, store: dist.TCPStore, device: torch.device, timeout: float) -> None:
    """Gather a description of every rank; rank 0 prints them, and names missing ranks."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    row = [process.rank, process.node, process.local_rank, socket.gethostname(), os.getpid(), what, process.launcher]
    store.set(f"rank {process.rank}", json.dumps([str(value) for value in row]))
    if process.rank:
        return
    until = time.monotonic() + timeout
    missing = set(range(size))
    while missing and time.monotonic() < until:
        missing = {rank for rank in missing if not store.check([f"rank {rank}"])}
        time.sleep(0.05)
    present = [json.loads(store.get(f"rank {rank}")) for rank in range(size) if rank not in missing]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *present, strict=True)]
    for line in (_COLUMNS, *present):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)
    if missing:
        named = ", ".join(map(str, sorted(missing)[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(f"{len(missing)} of {size} processes did not connect within {timeout:.0f} s: ranks {named}")
