# SPDX-License-Identifier: Apache-2.0
"""Text dataset for causal language models: Megatron's indexed data sets, blended by weight, or synthetic text."""
