# SPDX-License-Identifier: Apache-2.0
"""Part files of a prediction: safetensors files with the digest of the prediction."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from bionemo.checkpoint.tensors import Piece
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.common.files import replacing

KIND = "parts of a prediction"  # of their directory, see `create_owned`
NAME = "part-{:06}.safetensors"
COMPLETE = "complete"  # a hard link to the output, until the parts are deleted
NAMES = rf"part-\d{{6,}}\.safetensors|\..+\.tmp|{COMPLETE}"  # of all files that are written to their directory


def write_part(path: Path, columns: Mapping[str, np.ndarray], digest: str) -> None:
    """Write outputs, and `tokens` and `numbers` [k] of their sequences, to a part file atomically and durably.

    Arrays named as in PROBLEMS hold the numbers of the records whose SMILES have a problem.
    `digest` is that of the prediction.

    Raises:
        OSError: if it cannot be written.
    """
    pieces = [Piece(name, values.shape, (0,) * values.ndim, _tensor(values)) for name, values in columns.items()]
    with replacing(path) as new:
        write_tensors(new, pieces, {"identity": digest})


def count_sequences(path: Path, digest: str) -> int | None:
    """Return the number of sequences of a part, or None if it is missing, truncated or of another prediction."""
    try:
        with safe_open(path, framework="np") as file:
            count: int = file.get_slice("tokens").get_shape()[0]
            return count if file.metadata() == {"identity": digest} else None
    except (OSError, SafetensorError):
        return None


def read_numbers(path: Path, problem: str) -> list[int]:
    """Read the numbers of a part's records with a problem."""
    with safe_open(path, framework="np") as file:
        return file.get_tensor(problem).tolist()


def _tensor(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if values.size else torch.empty(values.shape, dtype=tensor.dtype)  # NumPy's may have stride 0
