# SPDX-License-Identifier: Apache-2.0
"""Where a run goes, and which of its processes this one is."""
