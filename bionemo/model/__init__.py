# SPDX-License-Identifier: Apache-2.0
"""Where BioNeMo v1 had its command for predictions."""
