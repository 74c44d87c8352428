# SPDX-License-Identifier: Apache-2.0
"""The machines a run is on: which process of how many this one is, whoever started it."""
