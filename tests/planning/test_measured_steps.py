# SPDX-License-Identifier: Apache-2.0
"""Estimated times of steps, and times that were measured on GPUs (scripts/benchmark/RESULTS.md, 2026-11-28)."""

from dataclasses import replace

import pytest

from bionemo.common.gpus import DEVICES
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches
from bionemo.planning.layouts import read_layout
from bionemo.planning.report import make_plan
from tests.conftest import ROOT

STEPS = [  # directory and name of the configuration, rows, GPU, milliseconds
    ("protein/esm2nv", "pretrain_esm2_8M", 128, "h100", 72),
    ("protein/esm2nv", "pretrain_esm2_8M", 128, "h200", 67),
    ("gpt3", "pretrain_gpt3_126m", 16, "h200", 120),
    ("protein/esm2nv", "pretrain_esm2_650M", 32, "h100", 403),
    ("protein/esm2nv", "pretrain_esm2_650M", 32, "h200", 373),
]


@pytest.mark.parametrize(("directory", "name", "rows", "gpu", "milliseconds"), STEPS)
def test_estimated_times(directory: str, name: str, rows: int, gpu: str, milliseconds: float) -> None:
    """They are within 15 % of the measured ones, for one micro-batch and an update."""
    overrides = ["trainer.devices=1", "trainer.num_nodes=1", f"model.micro_batch_size={rows}"]
    cfg = load(name, overrides, str(ROOT / "examples" / directory / "conf"))
    layout = replace(read_layout(cfg), micro_batches=MicroBatches(rows, 1))
    assert 1000 * make_plan(cfg, layout, DEVICES[gpu]).duration.total == pytest.approx(milliseconds, rel=0.15)
