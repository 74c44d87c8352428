# SPDX-License-Identifier: Apache-2.0
"""Former package of the prediction command in BioNeMo v1."""
