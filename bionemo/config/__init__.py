# SPDX-License-Identifier: Apache-2.0
"""Configuration: Hydra composes YAML files, dataclasses define the types, every mistake is a one-line error.

Nothing here imports torch or numpy.
"""
