# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: directories of tensors and JSON that can be read with any parallel layout."""

from bionemo.checkpoint.directory import find_newest, is_checkpoint, link, list_complete, remove, remove_unfinished
from bionemo.checkpoint.manifest import (
    MAIN_BRANCH,
    Branch,
    check,
    find_damage,
    load_manifest,
    read_branch,
    read_run_id,
    state_checksum,
)
from bionemo.checkpoint.merged_lora import MergedLoRA
from bionemo.checkpoint.reader import Checkpoint
from bionemo.checkpoint.source import WEIGHTS, TensorsInMemory, TensorSource
from bionemo.checkpoint.tensors import Piece, split_into_blocks
from bionemo.checkpoint.writer import save, save_distributed

__all__ = [
    "MAIN_BRANCH", "WEIGHTS", "Branch", "Checkpoint", "MergedLoRA", "Piece", "TensorSource", "TensorsInMemory",
    "check", "find_damage", "find_newest", "is_checkpoint", "link", "list_complete", "load_manifest", "read_branch",
    "read_run_id", "remove", "remove_unfinished", "save", "save_distributed", "split_into_blocks", "state_checksum",
]  # fmt: skip
