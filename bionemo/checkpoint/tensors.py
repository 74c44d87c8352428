# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors in safetensors files: written from where they lie in memory, hashed on the way.

The format (8 bytes header size, JSON header, values end to end) is that of the safetensors library, which reads them.
The library's own writer copies all tensors first; this one needs no memory of its own.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_CHUNK = 1 << 22  # bytes hashed and written at a time: still in the cache when they are written
_BURST = 1 << 25  # bytes after which the disk is to begin with them
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux alone has it
_START = 2  # SYNC_FILE_RANGE_WRITE
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A rectangular block of a tensor.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        offset: where the block begins in it.
        values: the block, on any device.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor

    @property
    def key(self) -> str:
        """Name of the block in its file."""
        whole = tuple(self.values.shape) == self.shape
        return self.name if whole else f"{self.name}@{','.join(map(str, self.offset))}"


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the stretch [start, stop) of a flattened array into rectangular blocks of it: (offset, shape), in order.

    For a matrix these are the end of a row, whole rows, and the beginning of a row.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that lie in the stretch whole
    if first > last:  # the stretch lies inside a row
        first = last = start // row
        edges = [(first, start - first * row, stop - first * row)]
        before, after = edges, []
    else:
        before = [(first - 1, start - (first - 1) * row, row)] if start % row else []
        after = [(last, 0, stop - last * row)] if stop % row else []
    for number, begin, end in before:
        yield from (((number, *offset), (1, *size)) for offset, size in blocks(shape[1:], begin, end))
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    for number, begin, end in after:
        yield from (((number, *offset), (1, *size)) for offset, size in blocks(shape[1:], begin, end))


def write(path: Path, pieces: Iterable[Piece], metadata: Mapping[str, str] | None = None) -> str:
    """Write pieces to a file, on disk when this returns.

    Args:
        path: of a new file.
        pieces: of tensors.
        metadata: what the file is to say beside them.

    Returns:
        The file's checksum.
    """
    pieces = sorted(pieces, key=lambda piece: -piece.values.element_size())  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for piece in pieces:
        if piece.key in header:
            raise ValueError(f"{piece.key} is to be written twice")
        end = at + piece.values.numel() * piece.values.element_size()
        header[piece.key] = {
            "dtype": DTYPES[piece.values.dtype], "shape": list(piece.values.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    begun = 0
    with path.open("xb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            _write_all(file.fileno(), memoryview(part))
        for piece in pieces:
            values = piece.values.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
            for first in range(0, len(values), _CHUNK):
                chunk = values[first : first + _CHUNK]
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
                if (ends := file.tell()) - begun >= _BURST:
                    _write_back(file.fileno(), begun, ends - begun)
                    begun = ends
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_text(path: Path, text: str) -> str:
    """Write a text file, on disk when this returns; give its checksum."""
    data = text.encode()
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(data))
        os.fsync(file.fileno())
    return checksum_of(data)


def checksum_of(data: bytes) -> str:
    """128 bits of XXH3: they find every accident and are ten times faster than SHA-256; no seal against forgery."""
    return xxhash.xxh3_128(data).hexdigest()


def checksum(path: Path) -> str:
    """Checksum of a file as it is on disk."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _write_back(descriptor: int, start: int, size: int) -> None:
    """Have the disk begin with what has been written, while the next bytes are copied.

    The kernel would wait until a tenth of memory is unwritten, or for the fsync.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _START)
