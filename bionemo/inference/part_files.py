# SPDX-License-Identifier: Apache-2.0
"""Part files of a prediction: safetensors files with the digest of the prediction and a checksum of their content."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from bionemo.checkpoint.tensors import Piece
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.common.files import replacing

KIND = "parts of a prediction"  # of their directory, see `create_owned`
NAME = "part-{:06}.safetensors"
LONG = "long"  # array with the numbers of the records that are longer than the model accepts
COMPLETE = "complete"  # a hard link to the output, until the parts are deleted
NAMES = rf"part-\d{{6,}}\.safetensors|\..+\.tmp|{COMPLETE}"  # of all files that are written to their directory


def write_part(path: Path, columns: Mapping[str, np.ndarray], digest: str) -> None:
    """Write outputs, and `tokens` and `numbers` [k] of their sequences, to a part file atomically and durably.

    Arrays named as in PROBLEMS hold the numbers of the records whose SMILES have a problem, LONG those of the records
    that are too long.
    `digest` is that of the prediction.

    Raises:
        OSError: if it cannot be written.
    """
    metadata = {"identity": digest, "checksum": _checksum(columns)}
    pieces = [Piece(name, values.shape, (0,) * values.ndim, _tensor(values)) for name, values in columns.items()]
    with replacing(path) as new:
        write_tensors(new, pieces, metadata)


def count_sequences(path: Path, digest: str) -> int | None:
    """Read and verify a part; return its number of sequences, or None if it is damaged or of another prediction."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError):
        return None
    if metadata != {"identity": digest, "checksum": _checksum(columns)}:
        return None
    return len(columns["tokens"])


def read_numbers(path: Path, problem: str) -> list[int]:
    """Read the numbers of a part's records with a problem: one of PROBLEMS, or LONG."""
    with safe_open(path, framework="np") as file:
        return file.get_tensor(problem).tolist()


def _tensor(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if values.size else torch.empty(values.shape, dtype=tensor.dtype)  # NumPy's may have stride 0


def _checksum(columns: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(columns):
        digest.update(f"{name} {columns[name].shape} {columns[name].dtype.str} ".encode())
        digest.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
