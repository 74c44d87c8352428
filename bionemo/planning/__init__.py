# SPDX-License-Identifier: Apache-2.0
"""Estimate parameters, memory, FLOPs and time of a run from formulas, without torch, data or a GPU."""
