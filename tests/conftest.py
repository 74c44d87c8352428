# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import bionemo  # noqa: F401  # limits oneDNN where the CPU needs it, before any test imports torch
from bionemo.common import redaction

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # like experiment/console_logging.py, before torch is imported

# the default limit of 200 ms per example fails on a busy machine
hypothesis.settings.register_profile("no time limit", deadline=None)
hypothesis.settings.load_profile("no time limit")

# scripts call `python` and `shellcheck`: use those of this environment even if it is not activated
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

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

_threads = 0  # of this process after the last collection


@pytest.fixture(autouse=True)
def nothing_stays_of_runs() -> Iterator[None]:
    """Destroy the process groups that training in a test created, and forget the secrets of its configuration.

    Each group keeps threads that wake up a hundred times per second, until the garbage collector deletes it.
    """
    yield
    redaction._registered.clear()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():  # after a run that failed
        distributed.destroy_process_group()
    global _threads  # noqa: PLW0603
    if len(os.listdir("/proc/self/task")) > _threads + 20:  # a run has 50
        gc.collect()
        _threads = len(os.listdir("/proc/self/task"))
        gc.freeze()  # the next collection skips the objects of imported modules, which take half a second


def checkpoint_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `bionemo checkpoint ARGUMENTS` in this process; return the exit status."""
    from bionemo.cli.main import main

    monkeypatch.setattr(sys, "argv", ["bionemo", "checkpoint", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
