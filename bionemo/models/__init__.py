# SPDX-License-Identifier: Apache-2.0
"""One module per model; CONTRIBUTING.md describes how to add one."""
