# SPDX-License-Identifier: Apache-2.0
"""Estimate memory, FLOPs and time of a run by a training step on tensors without data; needs no GPU."""
