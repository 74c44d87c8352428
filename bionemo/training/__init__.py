# SPDX-License-Identifier: Apache-2.0
"""One update, its schedule, its checkpoints and its reports."""
