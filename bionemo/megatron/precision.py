# SPDX-License-Identifier: Apache-2.0
"""Mixed precision and dynamic loss scaling."""

import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bionemo.common.cpu import amx_is_broken

log = logging.getLogger(__name__)

_MIN_SCALE, _MAX_SKIPPED = 1.0, 10  # accept this many consecutive skipped updates at the minimum scale
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class LossScaler:
    """Dynamic loss scaling with hysteresis, as in NeMo.

    The first `hysteresis` - 1 overflows after a growth do not change the scale; each later one halves it.
    """

    scale: float  # factor of the loss
    growth_interval: int  # number of steps without overflow after which the scale doubles
    hysteresis: int
    good_steps: int = 0  # steps without overflow since the last growth or overflow
    tolerated: int = 0  # overflows since the last growth
    skipped: int = 0  # consecutive overflows, that is, skipped updates

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step with or without overflow."""
        if overflow:
            self.good_steps = 0
            self.tolerated += 1
            self.skipped += 1
            if self.tolerated >= self.hysteresis:
                self.scale = max(self.scale / 2, _MIN_SCALE)
        else:
            self.skipped = 0
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale, self.good_steps, self.tolerated = self.scale * 2, 0, 0

    @property
    def exhausted(self) -> bool:
        """Whether the gradients keep overflowing at the minimum scale."""
        return self.scale <= _MIN_SCALE and self.skipped >= _MAX_SKIPPED

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counters."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the counters."""
        vars(self).update(state)


@dataclass(frozen=True)
class Precision:
    """Precision named `32`, `bf16-mixed` or `16-mixed`; weights, gradients and optimizer state are always fp32."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs of matrix products."""
        return _AUTOCAST_DTYPES.get(self.name, torch.float32)

    def autocast(self, device: torch.device) -> Any:
        """Return the context manager of the forward pass."""
        return nullcontext() if self.dtype is torch.float32 else torch.autocast(device.type, dtype=self.dtype)

    @property
    def needs_scaling(self) -> bool:
        """Whether the loss must be scaled to avoid underflow of gradients."""
        return self.name == "16-mixed"


def resolve_precision(name: str | int, gpu: bool | None = None) -> Precision:
    """Return the precision for `trainer.precision`; log a warning if this host computes in another one.

    Without a GPU, fp16 becomes bf16, or fp32 on CPUs that emulate bf16, which is ten times slower than fp32.

    Args:
        name: a precision, or `auto` for bf16-mixed on GPUs that support it, 16-mixed on other GPUs and 32 on CPUs.
        gpu: whether the run uses a GPU; None: if there is one.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    if name == "auto":
        if not gpu:
            return Precision("32")
        return Precision("bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed")
    resolved = {"32-true": "32", "bf16": "bf16-mixed", "16": "16-mixed"}.get(str(name), str(name))
    if resolved == "32" or gpu:
        return Precision(resolved)
    native = cpu_has_bf16()
    if resolved == "16-mixed":
        resolved = "bf16-mixed" if native else "32"
        log.warning("trainer.precision=16-mixed needs a GPU: using %s", resolved)
    elif not native:
        log.warning("trainer.precision=%s is slow on this CPU, which emulates bf16: 32 is faster", name)
    if resolved == "bf16-mixed" and native:
        _warn_of_broken_amx()
    return Precision(resolved)


def cpu_has_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; assume so if torch cannot tell."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    by_amx = capabilities.get("amx_bf16") and not amx_is_broken()
    return "avx2" not in capabilities or bool(capabilities.get("avx512_bf16") or by_amx)


@cache
def _warn_of_broken_amx() -> None:
    if amx_is_broken():
        log.warning(
            "this CPU reports AMX but not its tile sizes, as on some virtual machines: bf16 uses AVX-512 instead and "
            "is slower (ONEDNN_MAX_CPU_ISA=%s)",
            os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        )
