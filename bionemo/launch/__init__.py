# SPDX-License-Identifier: Apache-2.0
"""Sending a run to the machines that train it: text that starts it there, and who takes the text."""
