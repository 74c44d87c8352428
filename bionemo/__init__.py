# SPDX-License-Identifier: Apache-2.0
"""Pretrain and apply biomolecular language models."""

__version__ = "0.1.0"
