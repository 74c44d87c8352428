# SPDX-License-Identifier: Apache-2.0
"""Proteins as samples: sequences of a split, cut to rows, with residues masked or behind sentinels."""
