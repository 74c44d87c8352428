# SPDX-License-Identifier: Apache-2.0
"""`trainer.deterministic=True`: the same command on the same devices gives bitwise the same result, or an error.

torch raises an error for operations without deterministic implementation, and attention on a GPU uses another
implementation (megatron/attention.py). This module handles the settings that torch does not check.
"""

import os

from bionemo.common.errors import UserError
from bionemo.config.schema import TrainerConfig

# NCCL algorithms that add in a fixed order; without a setting, NCCL chooses by timing.
_NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
_CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS is deterministic


def require_determinism(config: TrainerConfig) -> None:
    """Set the environment variables that determinism needs; call it before the device is used.

    Raises:
        UserError: if a key or variable contradicts determinism.
    """
    if config.benchmark:
        raise UserError("trainer.benchmark=True chooses algorithms by timing: set it to False, or set "
                        "trainer.deterministic to False")  # fmt: skip
    _require("NCCL_ALGO", _NCCL_ALGORITHMS)
    _require("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACES)


def _require(variable: str, allowed: tuple[str, ...]) -> None:
    value = os.environ.setdefault(variable, allowed[0])
    if value not in allowed:
        raise UserError(
            f"{variable}={value} is not known to be deterministic: unset it, set it to one of {', '.join(allowed)}, "
            "or set trainer.deterministic to False"
        )
