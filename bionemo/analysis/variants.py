# SPDX-License-Identifier: Apache-2.0
"""Zero-shot scores of variants."""

from bionemo.inference.analysis.variants import scan, score_variants

__all__ = ["scan", "score_variants"]
