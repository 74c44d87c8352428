# SPDX-License-Identifier: Apache-2.0
"""Data pipeline: from sequence files to packed batches. Independent of models and trainer."""
