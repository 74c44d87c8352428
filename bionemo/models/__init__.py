# SPDX-License-Identifier: Apache-2.0
"""One file is one model. CONTRIBUTING.md says how to add one."""
