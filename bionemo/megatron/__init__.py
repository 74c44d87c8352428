# SPDX-License-Identifier: Apache-2.0
"""The edge to Megatron-Core: no other package imports `megatron`.

Importing this package first prepares the host, so that `megatron.core` works where there is no CUDA device too.
"""

from bionemo.megatron.cpu import adapt_to_cpu

adapt_to_cpu()
