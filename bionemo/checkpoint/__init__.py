# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as directories, independent of how a model was divided when they were written."""

from bionemo.checkpoint.directory import clean, complete, link, newest, remove
from bionemo.checkpoint.manifest import check, defect, manifest_of
from bionemo.checkpoint.reader import Checkpoint
from bionemo.checkpoint.source import TensorsInMemory, TensorSource
from bionemo.checkpoint.tensors import Piece, blocks
from bionemo.checkpoint.within import LanguageModelWithin
from bionemo.checkpoint.writer import save, save_together

__all__ = [
    "Checkpoint", "LanguageModelWithin", "Piece", "TensorSource", "TensorsInMemory", "blocks", "check", "clean",
    "complete", "defect", "link",
    "manifest_of", "newest", "remove", "save", "save_together",
]  # fmt: skip
