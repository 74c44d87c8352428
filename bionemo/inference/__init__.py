# SPDX-License-Identifier: Apache-2.0
"""Using a trained model: `open` reads it, `model` is what it computes, `run` goes through files."""
