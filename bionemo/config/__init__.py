# SPDX-License-Identifier: Apache-2.0
"""Configuration: Hydra composes it, dataclasses type it, every mistake ends in one line. Imports no torch."""

from bionemo.config.app import is_rank_zero, run

__all__ = ["is_rank_zero", "run"]
