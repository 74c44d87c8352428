# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as directories, independent of how a model was divided when they were written."""

from bionemo.checkpoint.directory import clean, complete, is_checkpoint, link, newest, remove
from bionemo.checkpoint.manifest import check, defect, manifest_of, run_of
from bionemo.checkpoint.merged_lora import LanguageModelWithin
from bionemo.checkpoint.reader import Checkpoint
from bionemo.checkpoint.source import TensorsInMemory, TensorSource
from bionemo.checkpoint.tensors import Piece, blocks
from bionemo.checkpoint.writer import save, save_together

__all__ = [
    "Checkpoint", "LanguageModelWithin", "Piece", "TensorSource", "TensorsInMemory", "blocks", "check", "clean",
    "complete", "defect", "is_checkpoint", "link",
    "manifest_of", "newest", "remove", "run_of", "save", "save_together",
]  # fmt: skip
