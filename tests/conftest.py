# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bionemo  # noqa: F401  # limits oneDNN where the CPU needs it, before any test imports torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # like interop/console_logging.py, before torch is imported

# scripts call `python` and `shellcheck`: use those of this environment even if it is not activated
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

RANKS = "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"  # of a launcher
_RANKS_BEFORE = {name: os.environ.get(name) for name in RANKS}
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "protein"
PRETRAINING = sorted(path.parent / "conf" for path in ROOT.glob("examples/**/pretrain.py"))  # one for every family
_OTHERS = "finetune", "infer", "downstream_flip", "downstream_sec_str"  # files for commands other than pretraining
RUNNABLE = [
    (directory, path.stem)
    for directory in PRETRAINING
    for path in sorted(directory.glob("*.yaml"))
    if not path.stem.startswith(("_", *_OTHERS))
]


@pytest.fixture(autouse=True)
def nothing_stays_of_runs() -> Iterator[None]:
    """Destroy the process groups and log handlers that training in a test created, and restore the environment.

    Each group keeps threads that wake up a hundred times per second, until the garbage collector deletes it. Handlers
    would write the logs of all later runs, too. Processes started by later tests would read the launcher variables as
    their own.
    """
    _restore_ranks()  # module fixtures may have run a training in this process
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        _close_logs()
        gc.collect()
        gc.freeze()  # the next collection skips the objects of imported modules, which take half a second
    _restore_ranks()


def _close_logs() -> None:
    """Remove the handlers and filters that every run adds to the loggers of other packages."""
    for name in ("lightning.pytorch", "megatron.core", "nemo_logger"):
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            handler.filters.clear()
            # NeMo replaces the log file of its own logger
            if isinstance(handler, logging.NullHandler if name == "nemo_logger" else logging.FileHandler):
                logger.removeHandler(handler)
                handler.close()


def _restore_ranks() -> None:
    for name, value in _RANKS_BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def checkpoint_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `bionemo checkpoint ARGUMENTS` in this process; return the exit status."""
    from bionemo.cli.main import main

    monkeypatch.setattr(sys, "argv", ["bionemo", "checkpoint", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
