# SPDX-License-Identifier: Apache-2.0
"""Watching over several ranks: each has a line to rank 0, whose roll call knows when one is gone or stuck."""
