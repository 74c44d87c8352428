# SPDX-License-Identifier: Apache-2.0
"""The edges to other frameworks."""
