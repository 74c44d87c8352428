# SPDX-License-Identifier: Apache-2.0
"""Specifications of GPUs from their data sheets, dense, without sparsity."""

from dataclasses import dataclass

from bionemo.common.errors import UserError

USABLE = 0.92  # fraction of the memory; the rest is for the CUDA context, NCCL, cuBLAS and fragmentation


@dataclass(frozen=True)
class Device:
    """A GPU model."""

    name: str  # product name
    memory: int  # MiB, as shown by nvidia-smi
    half: float  # TFLOP/s in fp16 and bf16
    single: float  # TFLOP/s in fp32, without TF32, which PyTorch does not use by default
    bandwidth: float  # memory bandwidth in GB/s
    link: float  # GB/s to the other GPUs of the node, in each direction
    network: float  # GB/s per GPU to other nodes, in each direction, in the manufacturer's own systems
    bf16: bool = True  # supports bf16 matrix products

    @property
    def usable(self) -> float:
        """Bytes that a run can use."""
        return USABLE * self.memory * 2**20


DEVICES = {
    "v100": Device("V100 32 GB", 32768, 125, 15.7, 900, 150, 12.5, bf16=False),
    "a100-40": Device("A100 40 GB", 40960, 312, 19.5, 1555, 300, 25),
    "a100-80": Device("A100 80 GB", 81920, 312, 19.5, 2039, 300, 25),
    "l40s": Device("L40S 48 GB", 46068, 362, 91.6, 864, 32, 25),
    "h100": Device("H100 80 GB", 81559, 989, 67, 3350, 450, 50),
    "h200": Device("H200 141 GB", 143771, 989, 67, 4800, 450, 50),
    "b200": Device("B200 180 GB", 183359, 2250, 75, 7700, 900, 50),
}


def match_device(name: str, memory: int) -> Device | None:
    """Return the device with the model in `name`, as torch reports it, and with `memory` MiB; or None.

    None where the data sheet does not apply: part of a GPU ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100D-40C")
    and other models of the same generation ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GB200").
    """
    words = name.upper().replace("-", " ").split()
    if "MIG" in words or ("PCIE" in words and "A100" not in words):  # the A100 has the same peak with PCIe
        return None
    found = [device for key, device in DEVICES.items() if key.partition("-")[0].upper() in words]
    return next((device for device in found if 0.94 <= memory / device.memory <= 1.03), None)


def find_device(name: str, precision: str) -> Device:
    """Return the GPU called `name`, on which a run has `trainer.precision=precision`.

    Raises:
        UserError: if it is unknown or does not support the precision.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise UserError(f"--device={name} is unknown: choose one of {', '.join(DEVICES)}")
    if precision.startswith("bf16") and not found.bf16:
        raise UserError(f"--device={name} does not support bf16: set trainer.precision=16-mixed")
    return found
