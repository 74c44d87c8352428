# SPDX-License-Identifier: Apache-2.0
"""Using a trained model: `model` holds it, `tokens` is what it reads, `run` goes through files."""
