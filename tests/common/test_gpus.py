# SPDX-License-Identifier: Apache-2.0
"""Names that CUDA reports for GPUs, and their data sheets."""

import pytest

from bionemo.common.gpus import match_device


@pytest.mark.parametrize(
    ("name", "memory", "found"),
    [
        ("NVIDIA H200", 143771, "H200 141 GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100 40 GB"),
        ("Tesla V100-SXM2-32GB", 32768, "V100 32 GB"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9856, None),  # a slice of a GPU
        ("NVIDIA GeForce RTX 4090", 24564, None),
    ],
)
def test_match_device(name: str, memory: int, found: str | None) -> None:
    device = match_device(name, memory)
    assert (device and device.name) == found
