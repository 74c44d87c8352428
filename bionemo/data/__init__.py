# SPDX-License-Identifier: Apache-2.0
"""From files of sequences to packed, masked batches; needs no model and no trainer."""
