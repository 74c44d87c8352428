# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models and predictions, by which stored partial results are recognized as reusable."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bionemo.checkpoint.manifest import MANIFEST
from bionemo.checkpoint.tensors import checksum_bytes
from bionemo.config.schema import InferDataConfig, TaskConfig
from bionemo.data.shards.index import FileState
from bionemo.inference.outputs import InferenceModel
from bionemo.interop.convert import CHECKPOINT, detect_format
from bionemo.tokenizers import Vocabulary

_FORMAT = 2  # increase it when a code change alters the results or the format of partial results
# Settings that cannot change the result, or that are part of the fingerprint of the model (max_length). All others are
# part of the fingerprint.
_IGNORED_DATA = (
    "dataset_path", "index_mapping_dir", "batch_size", "tokens_per_batch", "output_fname", "output_format",
    "overwrite", "max_length",
)  # fmt: skip
_IGNORED_TASK = ("restore_from_path",)


def prediction_fingerprint(
    task: TaskConfig, data: InferDataConfig, precision: str, paths: Iterable[Path], model: InferenceModel
) -> dict[str, Any]:
    """Return the fingerprint of a prediction as JSON values: its settings, the model and the input files.

    Raises:
        OSError: if a file cannot be read.
    """
    task_settings = {key: value for key, value in asdict(task).items() if key not in _IGNORED_TASK}
    data_settings = {key: value for key, value in asdict(data).items() if key not in _IGNORED_DATA}
    for reader in data_settings["data_impl_kwargs"].values():
        reader.pop("workers", None)
    return {
        "format": _FORMAT,
        "settings": digest([task_settings, data_settings, precision]),
        "model": model_fingerprint(model.path, model.network.config.max_position_embeddings, model.network.vocabulary),
        "input": digest([[path.suffix.lower(), FileState.of(path)] for path in paths]),
    }


def model_fingerprint(path: Path, positions: int, vocabulary: Vocabulary) -> str:
    """Return a digest of a trained model: verified checkpoint, `.nemo` archive or Hugging Face directory.

    `positions` is the maximum number of tokens of a sequence.

    Raises:
        OSError: if a file cannot be read.
    """
    if detect_format(path) == CHECKPOINT:  # its manifest holds the checksums of all files, which loading has verified
        weights: Any = checksum_bytes((path / MANIFEST).read_bytes())
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        weights = [[str(file.relative_to(path)), FileState.of(file)] for file in files]
    else:
        weights = FileState.of(path)
    return digest([weights, positions, vocabulary.identity])


def digest(value: Mapping[str, Any] | list[Any]) -> str:
    """Return a digest of JSON values; other values count as their text."""
    return checksum_bytes(json.dumps(value, sort_keys=True, default=str).encode())
