# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models and predictions, by which partial results are recognized as reusable; provenance of files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bionemo.checkpoint.tensors import checksum_bytes
from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_tree
from bionemo.common.version import __version__
from bionemo.config.schema import InferDataConfig, TaskConfig
from bionemo.data.shards.index import FileState
from bionemo.inference.batching import max_tokens
from bionemo.inference.outputs import InferenceModel
from bionemo.tokenizers import Vocabulary

_FORMAT = 3  # increase it when a code change alters the results or the format of partial results
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
    return {
        "format": _FORMAT,
        "settings": digest([*prediction_settings(task, data).values(), precision]),
        "model": model_fingerprint(
            model.weights_checksum, model.network.config.max_position_embeddings, model.network.vocabulary
        ),
        "input": digest([[path.suffix.lower(), FileState.of(path)] for path in paths]),
    }


def prediction_settings(task: TaskConfig, data: InferDataConfig) -> dict[str, Any]:
    """Return the settings that can change the result of a prediction, by the names of their groups."""
    task_settings = {key: value for key, value in asdict(task).items() if key not in _IGNORED_TASK}
    data_settings = {key: value for key, value in asdict(data).items() if key not in _IGNORED_DATA}
    for reader in data_settings["data_impl_kwargs"].values():
        reader.pop("workers", None)
    return {"downstream_task": task_settings, "data": data_settings}


def provenance(model: InferenceModel | None, settings: Mapping[str, Any], longer: int = 0) -> dict[str, Any]:
    """Return what determines the content of a result file, as JSON values without secrets.

    Args:
        model: the model; None: the file was made without one.
        settings: the settings that can change the content.
        longer: number of sequences with more than `max_tokens` tokens, which were truncated, split or dropped.

    Returns:
        `bionemo` (the version), `settings`, and for a model its path, fingerprint and precision, `max_tokens`, the
        maximum number of tokens of a sequence without begin and end, and `longer`.
    """
    known = {} if model is None else {
        "model": model.path.absolute(), "precision": model.precision.name, "max_tokens": max_tokens(model.network),
        "longer": longer, "model_fingerprint": model_fingerprint(
            model.weights_checksum, model.network.config.max_position_embeddings, model.network.vocabulary
        ),
    }  # fmt: skip
    return redact_tree(json.loads(json.dumps({"bionemo": __version__, "settings": settings, **known}, default=str)))


def write_provenance(path: Path, found: Mapping[str, Any]) -> None:
    """Write the provenance of a file whose format has no place for it to NAME.json beside it.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(path.with_name(f"{path.name}.json"), json.dumps(found, indent=1) + "\n")


def model_fingerprint(weights: str, positions: int, vocabulary: Vocabulary) -> str:
    """Return a digest of a trained model, which depends neither on its path nor on its format.

    Args:
        weights: checksum of the weights.
        positions: maximum number of tokens of a sequence.
        vocabulary: the vocabulary.
    """
    return digest([weights, positions, vocabulary.identity])


def digest(value: Mapping[str, Any] | list[Any]) -> str:
    """Return a digest of JSON values; other values count as their text."""
    return checksum_bytes(json.dumps(value, sort_keys=True, default=str).encode())
