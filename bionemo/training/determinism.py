# SPDX-License-Identifier: Apache-2.0
"""`trainer.deterministic=True`: the same command on the same devices gives the same bits, or does not run.

torch then raises at every operation that has no deterministic form, and our attention takes another path on a GPU
(megatron/attention.py). What torch cannot see is decided here.
"""

import os

from bionemo.common.errors import UserError
from bionemo.config.schema import TrainerConfig

# Algorithms of NCCL that add in a fixed order; where none is chosen, its choice depends on timing.
_FIXED_ORDER = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
_WORKSPACES = (":4096:8", ":16:8")  # cuBLAS is deterministic with these


def require_determinism(config: TrainerConfig) -> None:
    """Set what determinism needs before the device is first used, and refuse what contradicts it.

    Raises:
        UserError: naming the key or the variable.
    """
    if config.benchmark:
        raise UserError("trainer.benchmark=True picks algorithms by timing them: set it to False, or "
                        "trainer.deterministic to False")  # fmt: skip
    _require("NCCL_ALGO", _FIXED_ORDER)
    _require("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES)


def _require(variable: str, allowed: tuple[str, ...]) -> None:
    given = os.environ.setdefault(variable, allowed[0])
    if given not in allowed:
        raise UserError(
            f"{variable}={given} is not known to be deterministic: unset it, set it to one of {', '.join(allowed)}, "
            "or set trainer.deterministic to False"
        )
