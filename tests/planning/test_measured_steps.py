# SPDX-License-Identifier: Apache-2.0
"""Estimated times and memory of steps, and what was measured on GPUs (scripts/benchmark/RESULTS.md, 2026-11-28)."""

from dataclasses import replace

import pytest

from bionemo.common.gpus import DEVICES
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches
from bionemo.planning.layouts import read_layout
from bionemo.planning.report import make_plan
from tests.conftest import ROOT

STEPS = [  # directory and name of the configuration, rows, GPU, milliseconds, peak GiB
    ("protein/esm2nv", "pretrain_esm2_8M", 128, "h100", 72, 9.7),
    ("protein/esm2nv", "pretrain_esm2_8M", 128, "h200", 67, 9.7),
    ("gpt3", "pretrain_gpt3_126m", 16, "h200", 120, None),  # since then, the loss has needed a tenth of the memory
    ("protein/esm2nv", "pretrain_esm2_650M", 32, "h100", 403, 60.5),
    ("protein/esm2nv", "pretrain_esm2_650M", 32, "h200", 373, 60.5),
]


@pytest.mark.parametrize(("directory", "name", "rows", "gpu", "milliseconds", "gib"), STEPS)
def test_estimated_times_and_memory(
    directory: str, name: str, rows: int, gpu: str, milliseconds: float, gib: float | None
) -> None:
    """Times are within 15 % of the measured ones, for one micro-batch and an update.

    Memory is at most 10 % above the measured one: the layers were compiled, which a plan does not include.
    """
    overrides = ["trainer.devices=1", "trainer.num_nodes=1", f"model.micro_batch_size={rows}"]
    cfg = load(name, overrides, str(ROOT / "examples" / directory / "conf"))
    layout = replace(read_layout(cfg), micro_batches=MicroBatches(rows, 1))
    plan = make_plan(cfg, layout, DEVICES[gpu])
    assert 1000 * plan.duration.total == pytest.approx(milliseconds, rel=0.15)
    assert gib is None or 1 <= plan.memory.total / 2**30 / gib <= 1.1
