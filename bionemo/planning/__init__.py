# SPDX-License-Identifier: Apache-2.0
"""Estimate parameters, memory, FLOPs and time of a run from one measured step, without data or a GPU."""
