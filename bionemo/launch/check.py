# SPDX-License-Identifier: Apache-2.0
"""Test the connections between the processes of a run, and measure all-reduce (`bionemo cluster check`)."""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bionemo.common.errors import RankError, UserError
from bionemo.common.launcher_environment import Process, check_master_address

_WARM_UP = 3
_COLUMNS = ("rank", "node", "local", "host", "process", "device", "started by")


@dataclass(frozen=True)
class Sizes:
    """Message sizes in bytes: `first`, multiplied by `factor` up to `last`; each size is measured `times` times."""

    first: int
    last: int
    factor: int
    times: int

    def __iter__(self) -> Iterator[int]:
        size = self.first
        while size <= self.last:
            yield size
            size *= self.factor


def check(process: Process, sizes: Sizes, cpu: bool, timeout: float) -> None:
    """Print a table of all processes, then measure all-reduce between them.

    Uses gloo between CPUs if `cpu`, even if there are GPUs. All processes have to connect within `timeout` seconds.

    Raises:
        UserError: if a process does not connect or has no GPU, all-reduce fails, or a sum is wrong.
    """
    if process.world_size is None:
        raise UserError(f"WORLD_SIZE is not set ({process.launcher}): set it to the number of processes")
    gpu = torch.cuda.is_available() and not cpu
    if gpu:
        process.check_gpu(torch.cuda.device_count())
    device = torch.device("cuda", process.local_rank) if gpu else torch.device("cpu")
    store = _connect(process, process.world_size, timeout)
    _list_processes(process, process.world_size, store, device, timeout)
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=process.rank, world_size=process.world_size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        _measure(process.rank, process.world_size, sizes, device, backend)
    except (dist.DistError, RuntimeError) as error:
        raise RankError(
            f"rank {process.rank} on {socket.gethostname()}: all-reduce failed "
            f"({str(error).strip().splitlines()[0]}): see the messages of the other processes"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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
    _print_table(_COLUMNS, present)
    if missing:
        named = ", ".join(map(str, sorted(missing)[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(f"{len(missing)} of {size} processes did not connect within {timeout:.0f} s: ranks {named}")


def _measure(rank: int, ranks: int, sizes: Sizes, device: torch.device, backend: str) -> None:
    """Print time, algorithm bandwidth and bus bandwidth (times 2 (n - 1) / n), as NVIDIA's nccl-tests define them."""
    rows = []
    for size in sizes:
        numbers = torch.full((max(size // 4, 1),), float(rank + 1), device=device)
        dist.all_reduce(numbers)
        expected = ranks * (ranks + 1) / 2
        if not bool((numbers == expected).all()):
            raise UserError(f"rank {rank} on {socket.gethostname()}: the sum over all ranks is wrong")
        numbers.zero_()
        for _ in range(_WARM_UP):
            dist.all_reduce(numbers)
        seconds = _time(numbers, sizes.times)
        speed = size / seconds / 1e9
        rows.append(
            [_format_size(size), f"{seconds * 1e3:.3f}", f"{speed:.3f}", f"{speed * 2 * (ranks - 1) / ranks:.3f}"]
        )
    if rank == 0:
        print(f"\nall-reduce of float32 over {ranks} processes, {backend}, {sizes.times} repetitions")
        _print_table(("size", "ms", "GB/s", "bus GB/s"), rows)


def _time(numbers: torch.Tensor, times: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(numbers)
    if numbers.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def _print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def _format_size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
