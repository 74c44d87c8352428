# SPDX-License-Identifier: Apache-2.0
"""Health monitoring of distributed runs: all ranks end with one error message if a rank fails, dies or hangs."""
