# SPDX-License-Identifier: Apache-2.0
"""Models in the format of Hugging Face's transformers, read and written without that library.

The tables in `esm` and `gpt2` can be imported without torch.
"""
