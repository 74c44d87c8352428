# SPDX-License-Identifier: Apache-2.0
"""Tensors in the format of torch.distributed.checkpoint, as Megatron-Core writes it (`torch_dist`).

    .metadata            pickle: shape and pieces of every tensor, and where the pieces are
    __0_0.distcp, ...    pieces one after the other, each a file of torch.save

Reading executes nothing that the files contain: objects in the pickle are replaced by inert ones, and pieces are read
with `weights_only=True`.
"""

import io
import math
import pickle
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.formats.safe_load import load_saved
from bionemo.formats.shape_check import Shape, quote_error

METADATA = ".metadata"
_TYPES = frozenset((
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn",
    "float8_e5m2",
))  # fmt: skip
# Module -> names in it that the pickle may contain, also of earlier releases of torch and Megatron-Core. Nothing is
# imported or called: `_Record` replaces all of them.
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "builtins": ("getattr",),  # members of enumerations, as some releases of Python 3.11 pickle them
    "pathlib": ("PosixPath",),  # the path of the checkpoint
}  # fmt: skip


class _Record:
    """Replaces an object of a pickle, or the result of a call in it; holds the state of the object."""

    state: Any = ()

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments of a call."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _TYPES:
            return name
        if name in _NAMES.get(module, ()):
            return _Record
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


class _Piece(NamedTuple):
    path: Path
    start: int  # position in the file, bytes
    length: int  # bytes
    offset: Shape  # position in the tensor
    shape: Shape


class StoredTensor(NamedTuple):
    """A tensor in pieces, read on demand."""

    dtype: str  # such as "float32"
    shape: Shape
    pieces: list[_Piece]

    def read(self) -> Tensor:
        """Return the values.

        Raises:
            UserError: if a piece is damaged.
            OSError: if a file cannot be read.
        """
        whole = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        for piece in self.pieces:
            with piece.path.open("rb") as file:
                file.seek(piece.start)
                content = io.BytesIO(file.read(piece.length))
            block = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
            try:
                whole[block] = load_saved(content).reshape(piece.shape)
            except (AttributeError, RuntimeError, UserError) as error:  # not a tensor, or one of another size
                raise UserError(f"{piece.path} is damaged at byte {piece.start:,}: {quote_error(error)}") from error
        return whole

    def select(self, number: int) -> "StoredTensor":
        """Return one row of the first dimension, of which each piece contains one."""
        rows = [piece for piece in self.pieces if piece.offset[0] == number and piece.shape[0] == 1]
        pieces = [piece._replace(offset=piece.offset[1:], shape=piece.shape[1:]) for piece in rows]
        return StoredTensor(self.dtype, self.shape[1:], pieces)

    def check(self, name: str) -> None:
        """Check that all values exist, without reading them.

        Raises:
            UserError: if values or files are missing, or a file is truncated.
        """
        found = 0
        for piece in self.pieces:
            found += math.prod(piece.shape)
            length = piece.path.stat().st_size if piece.path.is_file() else -1
            if length < piece.start + piece.length:
                problem = f"{piece.path.name} is {'missing' if length < 0 else 'truncated'}"
                raise UserError(f"its {problem}, which contains {name}: copy the whole checkpoint")
        if found != math.prod(self.shape):
            raise UserError(f"{name} is incomplete: its pieces hold {found:,} of {math.prod(self.shape):,} values")


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name; other objects in it are left out.

    Raises:
        UserError: if .metadata is missing or damaged, or names other classes than those of the format.
        OSError: if it cannot be read.
    """
    if not (directory / METADATA).is_file():
        raise UserError(f"its {directory.name}/{METADATA} is missing: only the format torch_dist is supported")
    content = (directory / METADATA).read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(content)).load().state
        places = {
            (key.state["fqn"], key.state.get("offset")): place.state for key, place in metadata["storage_data"].items()
        }

        def to_piece(name: str, whole: Shape, chunk: dict[str, Any]) -> _Piece:
            place = places[name, chunk["offsets"]]
            path = directory / Path(place["relative_path"]).name  # never a file in another directory
            offset, shape = (tuple(map(index, chunk[key])) for key in ("offsets", "sizes"))
            if any(
                not 0 <= start <= start + size <= end for start, size, end in zip(offset, shape, whole, strict=True)
            ):
                raise ValueError(f"a piece of {name} is outside of it")
            return _Piece(path, index(place["offset"]), index(place["length"]), offset, shape)

        return {
            name: StoredTensor(
                entry.state["properties"].state[0], entry.state["size"],
                [to_piece(name, entry.state["size"], chunk.state) for chunk in entry.state["chunks"]],
            )
            for name, entry in metadata["state_dict_metadata"].items()
            if "chunks" in entry.state
        }  # fmt: skip
    except Exception as error:  # pickle raises various types
        raise UserError(f"its {METADATA} is damaged, or of another format ({quote_error(error)})") from error
