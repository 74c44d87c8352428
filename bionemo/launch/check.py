# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of a run find each other, and how fast they exchange data: a broken cluster shows here."""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import Process, check_master_address

_WARM_UP = 3
_COLUMNS = ("rank", "node", "local", "host", "process", "device", "started by")


@dataclass(frozen=True)
class Sizes:
    """What is exchanged, in bytes: from `first` to `last`, each `factor` times the one before, `times` times."""

    first: int
    last: int
    factor: int
    times: int

    def __iter__(self) -> Iterator[int]:
        size = self.first
        while size <= self.last:
            yield size
            size *= self.factor


def check(process: Process, sizes: Sizes, cpu: bool, patience: float) -> None:
    """Say who is there, then measure all-reduce among them.

    Args:
        process: this one.
        sizes: of the data.
        cpu: use gloo between CPUs even where there are GPUs.
        patience: seconds that all have to come.

    Raises:
        UserError: when some do not come, or a sum is wrong.
    """
    if process.world_size is None:
        raise UserError(f"{process.launcher} does not say how many processes there are: set WORLD_SIZE")
    gpu = torch.cuda.is_available() and not cpu
    device = torch.device("cuda", process.local_rank) if gpu else torch.device("cpu")
    store = _meet(process, process.world_size, patience)
    _roll_call(process, process.world_size, store, device, patience)
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=process.rank, world_size=process.world_size,
        timeout=timedelta(seconds=patience),
    )  # fmt: skip
    try:
        _measure(process.rank, process.world_size, sizes, device, backend)
    finally:
        dist.destroy_process_group()


def _meet(process: Process, size: int, patience: float) -> dist.TCPStore:
    check_master_address(process)
    first = process.rank == 0 and process.launcher != "torchrun"  # which serves one at this port already
    try:
        return dist.TCPStore(
            process.address, process.port, size, first, timedelta(seconds=patience), wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"rank {process.rank} on {socket.gethostname()} does not reach rank 0 at {process.address}:{process.port} "
            f"within {patience:.0f} s: see that the name is known there, and the port open ({_first(error)})"
        ) from error


def _roll_call(process: Process, size: int, store: dist.TCPStore, device: torch.device, patience: float) -> None:
    """Every rank writes its line; the first one prints them, and names those that have not come."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    words = [process.rank, process.node, process.local_rank, socket.gethostname(), os.getpid(), what, process.launcher]
    store.set(f"rank {process.rank}", json.dumps([str(word) for word in words]))
    if process.rank:
        return
    until = time.monotonic() + patience
    missing = set(range(size))
    while missing and time.monotonic() < until:
        missing = {rank for rank in missing if not store.check([f"rank {rank}"])}
        time.sleep(0.05)
    present = [json.loads(store.get(f"rank {rank}")) for rank in range(size) if rank not in missing]
    _table(_COLUMNS, present)
    if missing:
        named = ", ".join(map(str, sorted(missing)[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(f"{len(missing)} of {size} processes have not come within {patience:.0f} s: ranks {named}")


def _measure(rank: int, ranks: int, sizes: Sizes, device: torch.device, backend: str) -> None:
    """Print time and bandwidths, as NVIDIA's nccl-tests define them: of the bus, 2 (n - 1) / n of what is summed."""
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
        rows.append([_shown(size), f"{seconds * 1e3:.3f}", f"{speed:.3f}", f"{speed * 2 * (ranks - 1) / ranks:.3f}"])
    if rank == 0:
        print(f"\nall-reduce of float32 over {ranks} processes, {backend}, {sizes.times} times each")
        _table(("size", "ms", "GB/s", "GB/s of the bus"), rows)


def _time(numbers: torch.Tensor, times: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(numbers)
    if numbers.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def _shown(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
