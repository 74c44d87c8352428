# SPDX-License-Identifier: Apache-2.0
"""What another thread sees of the main thread and of the process; nothing here waits for either."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

_PYTHON, _TORCH = (str(Path(module.__file__ or "").parent) for module in (threading, torch))


def collectives() -> dict[str, int]:
    """How many collective operations this rank has begun, by process group; torch counts them.

    Not those of pipeline groups, where a middle stage sends and receives more than the others.
    """
    groups: list[Any] = [group for group in list(_world.pg_map) if "PIPELINE" not in group.group_desc]
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}
    except RuntimeError:  # a backend that does not count
        return {}


def megabytes() -> int:
    """Read and written so far."""
    try:
        return sum(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()) >> 20
    except OSError:
        return 0


def main_frame() -> FrameType | None:
    """Where the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place() -> str:
    """Where the main thread is, outside of the libraries that it may wait in."""
    frame = main_frame()
    while frame is not None and _in_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_library(file: str) -> bool:
    return file.startswith(("<", _TORCH)) or (file.startswith(_PYTHON) and "-packages" not in file)
