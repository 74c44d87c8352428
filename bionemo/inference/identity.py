# SPDX-License-Identifier: Apache-2.0
"""Everything that determines the result of a computation, to tell whether a stored one can be used."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bionemo.checkpoint.manifest import MANIFEST
from bionemo.checkpoint.tensors import checksum_of
from bionemo.config.schema import InferDataConfig, TaskConfig
from bionemo.data.shards.index import Fingerprint
from bionemo.inference.outputs import Outputs
from bionemo.interop.convert import CHECKPOINT, kind_of
from bionemo.tokenizers import Vocabulary

_FORMAT = 1  # to be raised when the same settings give another result, or parts are stored in another way
# Settings that cannot change the result. What is not listed here is part of the identity.
_NOT_OF_DATA = (
    "dataset_path", "index_mapping_dir", "batch_size", "tokens_per_batch", "output_fname", "output_format",
    "overwrite",
)  # fmt: skip
_NOT_OF_TASK = ("restore_from_path",)


def of_prediction(
    task: TaskConfig, data: InferDataConfig, precision: str, paths: Iterable[Path], model: Outputs
) -> dict[str, Any]:
    """The identity of a prediction: its settings, and the content of the model and of the input.

    Args:
        task: `model.downstream_task`.
        data: `model.data`.
        precision: `trainer.precision`.
        paths: of the input, in the order in which it is read.
        model: that computes it.

    Returns:
        JSON values.

    Raises:
        OSError: when a file cannot be read.
    """
    asked = {key: value for key, value in asdict(task).items() if key not in _NOT_OF_TASK}
    read = {key: value for key, value in asdict(data).items() if key not in _NOT_OF_DATA}
    for reader in read["data_impl_kwargs"].values():
        reader.pop("workers", None)
    return {
        "format": _FORMAT,
        "settings": digest_of([asked, read, precision]),
        "model": of_model(model.path, model.network.config.max_position_embeddings, model.network.vocabulary),
        "input": digest_of([[path.suffix.lower(), _content(path)] for path in paths]),
    }


def of_model(path: Path, positions: int, vocabulary: Vocabulary) -> str:
    """A digest of a trained model.

    Args:
        path: of a checkpoint that was verified, a `.nemo` archive, or a directory of Hugging Face's.
        positions: tokens that it reads, at most.
        vocabulary: of the model.

    Raises:
        OSError: when a file cannot be read.
    """
    if kind_of(path) == CHECKPOINT:  # its manifest holds the checksums of all files, which loading has verified
        weights: Any = checksum_of((path / MANIFEST).read_bytes())
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        weights = [[str(file.relative_to(path)), _content(file)] for file in files]
    else:
        weights = _content(path)
    return digest_of([weights, positions, vocabulary.identity])


def digest_of(value: Mapping[str, Any] | list[Any]) -> str:
    """A digest of JSON values; others stand for themselves as text."""
    return checksum_of(json.dumps(value, sort_keys=True, default=str).encode())


def _content(path: Path) -> list[Any]:
    """The state of a file, as far as it can be told without reading all of it."""
    return list(Fingerprint.of(path))
