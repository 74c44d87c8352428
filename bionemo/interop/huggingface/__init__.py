# SPDX-License-Identifier: Apache-2.0
"""Models in the form of Hugging Face's transformers, read and written without them.

`names` says how weights correspond, `esm` and `gpt2` are kinds of models, `directory` the files.
"""

from bionemo.interop.huggingface.contacts import ContactHead, checked
from bionemo.interop.huggingface.directory import ARCHITECTURES, HuggingFaceModel, is_directory, write

__all__ = ["ARCHITECTURES", "ContactHead", "HuggingFaceModel", "checked", "is_directory", "write"]
