# SPDX-License-Identifier: Apache-2.0
"""Interface to Megatron-Core, with and without CUDA (see patches.py).

Besides `preparation/megatron_corpus.py`, no code outside this package imports `megatron`.
"""

import logging
import sys
import warnings
from typing import Any
from unittest.mock import patch

import torch

# On import Megatron-Core also loads torch's compiler, for fused functions that no model here calls, and wandb, for its
# inference server. Both take more than 2 s of CPU.
_modules: dict[str, Any] = sys.modules
_blocked = _modules.setdefault("wandb", None) is None
_extensions = logging.getLogger("torch.utils.cpp_extension")
_extensions.disabled = True  # it warns of CUDA without a GPU, as on the login node of a cluster
with warnings.catch_warnings(), patch.object(torch, "compile", lambda function: function):
    # It warns about each optional accelerator library that is not installed.
    warnings.simplefilter("ignore")
    import megatron.core.tensor_parallel
    import megatron.core.transformer.transformer_block  # noqa: F401
_extensions.disabled = False
if _blocked:
    del _modules["wandb"]
