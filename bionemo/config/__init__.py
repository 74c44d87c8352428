# SPDX-License-Identifier: Apache-2.0
"""Configuration: Hydra composes it, dataclasses type it, every mistake ends in one line. Imports no torch."""

from bionemo.config.app import run

__all__ = ["run"]
