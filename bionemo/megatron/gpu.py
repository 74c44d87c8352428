# SPDX-License-Identifier: Apache-2.0
"""Checks of the NVIDIA GPU and its driver, and settings of torch, before a run uses them."""

import os
import re
from pathlib import Path

import torch

from bionemo.common.errors import HostError

_DEVICE_FILE = Path("/dev/nvidia0")
_INSTEAD = "or use the CPU with trainer.accelerator=cpu"


def use_gpu(accelerator: str) -> bool:
    """Return whether to use GPUs with this value of `trainer.accelerator`.

    Raises:
        HostError: if there is no GPU although one is required, the driver is too old for torch, or the GPU is.
    """
    if accelerator == "cpu":
        return False
    if torch.cuda.is_available():
        _check_capability()
        # varlen_attn of torch 2.15 selects cuDNN on Hopper and Blackwell; `fastest_gpu_attention` measures it first.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return True
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and not re.match(r"\d|GPU-|MIG-", visible)  # "", -1, or Slurm's NoDevFiles
    if torch.version.cuda is not None and not hidden and _DEVICE_FILE.exists():
        variable = f" and CUDA_VISIBLE_DEVICES={visible}" if visible else ""
        raise HostError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU with the installed driver"
            f"{variable}: {'correct the variable, ' if variable else ''}update the driver, install "
            f"torch for an older CUDA version, {_INSTEAD}"
        )
    if accelerator != "auto":
        cpu_only = torch.version.cuda is None and _DEVICE_FILE.exists()
        reason = f"torch {torch.__version__} was built without CUDA" if cpu_only else "this machine has no GPU"
        raise HostError(f"trainer.accelerator={accelerator}: {reason}; use auto or cpu")
    return False


def _check_capability() -> None:
    """Check that torch was built for this GPU or an older one."""
    capability = torch.cuda.get_device_capability()
    built = [int(number) for number in re.findall(r"(?:sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if built and capability < divmod(min(built), 10):
        needed, found = (f"{major}.{minor}" for major, minor in (divmod(min(built), 10), capability))
        raise HostError(
            f"{torch.cuda.get_device_name()} has compute capability {found}, but torch {torch.__version__} needs "
            f"{needed} or higher: use a newer GPU, install torch for an older CUDA version, {_INSTEAD}"
        )
