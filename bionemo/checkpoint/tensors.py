# SPDX-License-Identifier: Apache-2.0
"""Write tensors to safetensors files, and compute the checksums while writing.

The format (8 bytes header size, JSON header, contiguous values) is that of the safetensors library, which reads the
files. The library's own writer copies all tensors first; this one needs no additional memory.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_CHUNK = 1 << 22  # bytes hashed and written at once: they stay in the CPU cache
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A rectangular block of a tensor."""

    name: str  # name of the whole tensor
    shape: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]  # start of the block in the tensor
    values: Tensor  # values of the block, on any device

    @classmethod
    def whole(cls, name: str, values: Tensor) -> "Piece":
        """Return a piece that is a whole tensor."""
        return cls(name, tuple(values.shape), (0,) * values.dim(), values)

    @property
    def key(self) -> str:
        """Name of the block in its file."""
        is_whole = tuple(self.values.shape) == self.shape
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.offset))}"


def split_into_blocks(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the range [start, stop) of a flattened array into rectangular blocks of the array.

    For a matrix these are the end of a row, whole rows, and the beginning of a row.

    Yields:
        Offset and shape of each block, in order.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return

    def part_of_row(number: int, begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offset, size in split_into_blocks(shape[1:], begin, end):
            yield (number, *offset), (1, *size)

    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows in the range
    if first > last:  # the range lies inside a row
        yield from part_of_row(last, start % row, stop % row)
        return
    if start % row:
        yield from part_of_row(first - 1, start % row, row)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from part_of_row(last, 0, stop % row)


def write(path: Path, pieces: Iterable[Piece], metadata: Mapping[str, str] | None = None) -> str:
    """Write pieces to a new safetensors file with this `__metadata__`, flush it to disk and return its checksum."""
    pieces = sorted(pieces, key=lambda piece: -piece.values.element_size())  # aligns all of them
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for piece in pieces:
        if piece.key in header:
            raise ValueError(f"{piece.key} is given twice")
        end = position + piece.values.numel() * piece.values.element_size()
        header[piece.key] = {
            "dtype": DTYPES[piece.values.dtype], "shape": list(piece.values.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with path.open("xb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for piece in pieces:
            values = piece.values.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
            for first in range(0, len(values), _CHUNK):
                chunk = values[first : first + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_text(path: Path, text: str) -> str:
    """Write a new text file, flush it to disk and return its checksum."""
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksum_bytes(data)


def checksum_bytes(data: bytes) -> str:
    """Return the 128-bit XXH3 hash, ten times faster than SHA-256; it detects damage, not forgery."""
    return xxhash.xxh3_128(data).hexdigest()


def checksum_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a checksum of the names, shapes and fp32 values of weights; it depends neither on order nor on format."""
    lines = []
    for name, values in weights:
        numbers = values.detach().float().cpu().contiguous().numpy()
        lines.append(f"{name} {list(values.shape)} {xxhash.xxh3_128_hexdigest(numbers.data)}")
    return checksum_bytes("\n".join(sorted(lines)).encode())


def checksum_file(path: Path) -> str:
    """Return the checksum of a file."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
    return digest.hexdigest()
