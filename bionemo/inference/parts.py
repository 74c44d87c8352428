# SPDX-License-Identifier: Apache-2.0
"""Parts of a prediction: safetensors files that say which prediction they are of, and hold their own checksum."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from bionemo.checkpoint.tensors import Piece
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.common.files import replacing

KIND = "parts of a prediction"
COMPLETE = "complete"  # a hard link to the output, until the parts are deleted
NAMES = rf"part-\d{{6,}}\.safetensors|\..+\.tmp|{COMPLETE}"  # of all files that are written to their directory


def name_of(number: int) -> str:
    """Name of the file of a part."""
    return f"part-{number:06}.safetensors"


def write(path: Path, columns: Mapping[str, np.ndarray], identity: str) -> None:
    """Write a part; it is on disk, and whole, when the file has its name.

    Args:
        path: of the file.
        columns: what was computed, and `tokens` and `numbers` [k] of its sequences.
        identity: of the prediction.

    Raises:
        OSError: when it cannot be written.
    """
    metadata = {"identity": identity, "checksum": _checksum(columns)}
    pieces = [Piece(name, values.shape, (0,) * values.ndim, _tensor(values)) for name, values in columns.items()]
    with replacing(path) as new:
        write_tensors(new, pieces, metadata)


def length_of(path: Path, identity: str) -> int | None:
    """Number of sequences of a part; None for one that is damaged, cannot be read, or is of another prediction.

    Reads all of it.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError):
        return None
    if metadata != {"identity": identity, "checksum": _checksum(columns)}:
        return None
    return len(columns["tokens"])


def _tensor(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if values.size else torch.empty(values.shape, dtype=tensor.dtype)  # NumPy's may have stride 0


def _checksum(columns: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(columns):
        digest.update(f"{name} {columns[name].shape} {columns[name].dtype.str} ".encode())
        digest.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
