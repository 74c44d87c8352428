# SPDX-License-Identifier: Apache-2.0
"""Models in the format of Hugging Face's transformers, read and written without that library."""
