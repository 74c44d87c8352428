# SPDX-License-Identifier: Apache-2.0
"""Exchange of models and logs with NeMo, Hugging Face and Weights & Biases."""
