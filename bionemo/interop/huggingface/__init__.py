# SPDX-License-Identifier: Apache-2.0
"""Models in the form of Hugging Face's transformers, read and written without them.

`names` says how weights correspond, `gpt2` is one kind of model, `directory` the files.
"""

from bionemo.interop.huggingface.directory import ARCHITECTURES, HuggingFaceModel, is_directory, write

__all__ = ["ARCHITECTURES", "HuggingFaceModel", "is_directory", "write"]
