# SPDX-License-Identifier: Apache-2.0
"""Which number formats a step computes in, and the loss scaling that fp16 needs."""

import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bionemo.common.cpu import amx_is_broken

log = logging.getLogger(__name__)

_LOWEST, _MOST_SKIPPED = 1.0, 10  # loss scale; steps in a row without an update that are accepted at that scale
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class LossScaler:
    """Dynamic loss scaling with hysteresis: the first overflows after a growth are tolerated, each later one halves.

    Attributes:
        scale: what the loss is multiplied by.
        growth_interval: steps without overflow after which the scale doubles.
        hysteresis: overflows tolerated before the scale halves.
    """

    scale: float
    growth_interval: int
    hysteresis: int
    good_steps: int = 0
    tolerated: int = 0
    skipped: int = 0  # overflows since the last good step

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step."""
        if overflow:
            self.good_steps = 0
            self.tolerated += 1
            self.skipped += 1
            if self.tolerated >= self.hysteresis:
                self.scale = max(self.scale / 2, _LOWEST)
        else:
            self.skipped = 0
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale, self.good_steps, self.tolerated = self.scale * 2, 0, 0

    @property
    def exhausted(self) -> bool:
        """Whether a lower scale cannot help: the gradients overflow again and again without one."""
        return self.scale <= _LOWEST and self.skipped >= _MOST_SKIPPED

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        vars(self).update(state)


@dataclass(frozen=True)
class Precision:
    """`32`, `bf16-mixed` or `16-mixed`: weights, gradients and optimizer stay in fp32 in all of them."""

    name: str

    def autocast(self, device: torch.device) -> Any:
        """Context in which matrix products run in the half format."""
        dtype = _AUTOCAST.get(self.name)
        return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients underflow without a scaled loss."""
        return self.name == "16-mixed"


def precision_for_host(name: str | int) -> Precision:
    """Take v1's names, and say so where the host calls for another precision.

    Without a GPU fp16 becomes bf16, or fp32 on a CPU that has to emulate bf16: that is ten times slower than fp32.
    """
    plain = {"32-true": "32", "bf16": "bf16-mixed", "16": "16-mixed"}.get(str(name), str(name))
    if plain == "32" or torch.cuda.is_available():
        return Precision(plain)
    native = cpu_has_bf16()
    if plain == "16-mixed":
        plain = "bf16-mixed" if native else "32"
        log.warning("trainer.precision=16-mixed needs a GPU: computing in %s here", plain)
    elif not native:
        log.warning("trainer.precision=%s is slow on this CPU, which emulates it: 32 is faster here", name)
    if plain == "bf16-mixed" and native:
        _note_unusable_amx()
    return Precision(plain)


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 numbers itself; one of which nothing is known is believed to."""
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # older torch cannot tell
    by_amx = able.get("amx_bf16") and not amx_is_broken()
    return "avx2" not in able or bool(able.get("avx512_bf16") or by_amx)


@cache
def _note_unusable_amx() -> None:
    """Warn once in each process; the console shows messages of the first rank only."""
    if amx_is_broken():
        log.warning(
            "this CPU advertises AMX but does not describe its tiles, as on some virtual machines: bf16 uses AVX-512 "
            "instead and is slower (ONEDNN_MAX_CPU_ISA=%s)",
            os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        )
