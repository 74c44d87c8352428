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
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 81037, None),  # all its memory, but 98 of 108 multiprocessors
        ("NVIDIA H100 80GB HBM3", 81089, "H100 80 GB"),
        ("NVIDIA A100-PCIE-40GB", 40442, "A100 40 GB"),
        ("NVIDIA A100 80GB PCIe", 81050, "A100 80 GB"),
        ("NVIDIA H100 PCIe", 81007, None),  # 756 TFLOP/s, not 989
        ("NVIDIA H100 NVL", 95319, None),
        ("NVIDIA GB200", 189471, None),
        ("NVIDIA B200", 182641, "B200 180 GB"),
        ("Tesla V100-SXM2-16GB", 16151, None),  # not in the table
        ("GRID A100D-40C", 40960, None),  # a virtual GPU
        ("NVIDIA GeForce RTX 4090", 24564, None),
    ],
)
def test_match_device(name: str, memory: int, found: str | None) -> None:
    device = match_device(name, memory)
    assert (device and device.name) == found
