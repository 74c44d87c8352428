# SPDX-License-Identifier: Apache-2.0
"""What GPUs can do: figures of their makers, dense, without sparsity."""

from dataclasses import dataclass

from bionemo.common.errors import UserError

USABLE = 0.92  # share of the memory: the rest is for the CUDA context, NCCL, cuBLAS and fragmentation


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
        name: as it is sold.
        memory: MiB that nvidia-smi shows.
        half: TFLOP/s in fp16, and in bf16 if it has that.
        single: TFLOP/s in fp32; PyTorch uses TF32 only when told to, which we do not.
        bandwidth: of its memory, GB/s.
        link: to the other GPUs of its machine, GB/s in each direction.
        network: to other machines, GB/s a GPU in each direction, as its maker's own machines have it.
        bf16: whether it multiplies bf16 numbers itself.
    """

    name: str
    memory: int
    half: float
    single: float
    bandwidth: float
    link: float
    network: float
    bf16: bool = True

    @property
    def usable(self) -> float:
        """Bytes that a run may fill."""
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


def device(name: str, precision: str) -> Device:
    """Look a GPU up.

    Raises:
        UserError: when there is none of this name, or it cannot compute as asked.
    """
    if name.lower() not in DEVICES:
        raise UserError(f"--device={name} is not known: choose one of {', '.join(DEVICES)}")
    found = DEVICES[name.lower()]
    if precision.startswith("bf16") and not found.bf16:
        raise UserError(f"--device={name} has no bf16: set trainer.precision=16-mixed")
    return found
