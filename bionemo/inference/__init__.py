# SPDX-License-Identifier: Apache-2.0
"""Inference with trained models: `load` a model, compute outputs (`model`), or predict files (`predict_files`)."""
