# SPDX-License-Identifier: Apache-2.0
"""Public names of `bionemo.inference.analysis`, and `python -m bionemo.analysis`."""
