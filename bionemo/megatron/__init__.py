# SPDX-License-Identifier: Apache-2.0
"""Interface to Megatron-Core; no other package imports `megatron`. It works with and without CUDA (see patches.py)."""

import warnings

with warnings.catch_warnings():
    # On import Megatron-Core warns about each optional accelerator library that is not installed.
    warnings.simplefilter("ignore")
    import megatron.core.tensor_parallel
    import megatron.core.transformer.transformer_block  # noqa: F401
