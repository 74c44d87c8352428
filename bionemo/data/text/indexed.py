# SPDX-License-Identifier: Apache-2.0
"""Reader of Megatron's indexed data sets: `<prefix>.bin` with token ids, `<prefix>.idx` with document boundaries.

Index, little-endian: magic, version 1 (u64), code of the id type (u8), number of sequences n (u64) and of document
bounds m (u64); length of each sequence in tokens (i32 [n]), its byte offset in the .bin file (i64 [n]), and the first
sequence of each document, then n (i64 [m]). GPT data has one sequence per document. Both files are memory-mapped, and
all entries of the index are checked.
"""

import struct
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.index import FileState

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_TYPES = (6, 7)


class IndexedTokens:
    """All tokens of an indexed data set in file order. Pickles as its prefix; the copy maps the files again.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        tokens: [n] memory-mapped ids, with the integer type of the file.
        documents: number of documents, including empty ones.
    """

    tokens: NDArray[np.integer[Any]]

    def __init__(self, prefix: str | Path, *, check: bool = True) -> None:
        """Map the files; check every entry of the index or, without `check`, only the header and the sizes.

        Raises:
            UserError: if a file is missing or invalid.
        """
        self.prefix = str(prefix)
        self._bin, self._idx = f"{prefix}.bin", f"{prefix}.idx"
        self._files: list[MappedFile] = []
        index = self._map(self._idx)
        if len(index) < _HEADER.size:
            self._fail("is too short")
        magic, version, code, sequences, bounds = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            self._fail("does not begin with MMIDIDX")
        if version != _VERSION:
            self._fail(f"has version {version}, not {_VERSION}")
        if code not in _TYPES:
            floats = code in _FLOAT_TYPES
            self._fail("contains floating-point numbers, not ids" if floats else f"has the unknown type {code}")
        if len(index) != _HEADER.size + 12 * sequences + 8 * bounds:
            self._fail(f"has {len(index):,} bytes, which is wrong for {sequences:,} sequences and {bounds:,} bounds")

        self._lengths = np.frombuffer(index, "<i4", sequences, _HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", sequences, _HEADER.size + 4 * sequences)
        self._bounds = np.frombuffer(index, "<i8", bounds, _HEADER.size + 12 * sequences)
        self.documents = bounds - 1
        data, dtype = self._map(self._bin), np.dtype(_TYPES[code])
        if check:
            self._check_index(len(data), dtype.itemsize)
        if len(data) % dtype.itemsize:
            self._fail(f"belongs to other data: {self._bin} is truncated")
        self.tokens = data.view(dtype)

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(IndexedTokens, self.prefix, check=False), ()

    def check(self) -> None:
        """Check that the files have not been truncated since they were mapped; call it before reading `tokens`.

        Errors as in `MappedFile.check`.
        """
        for file in self._files:
            file.check()

    def document_start(self, document: int) -> int:
        """Return the index of the first token of a document; the number of tokens for the end of the last one."""
        self.check()
        sequence = int(self._bounds[document])
        return len(self) if sequence == len(self._pointers) else int(self._pointers[sequence]) // self.tokens.itemsize

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Sizes, and hashes of samples of both files."""
        hashes = [FileState.of(Path(path)).blake2b for path in (self._bin, self._idx)]
        return {"tokens": len(self), "documents": self.documents, "hashes": hashes}

    def _map(self, path: str) -> NDArray[np.uint8]:
        try:
            file = MappedFile(path)
        except ValueError:  # an empty file cannot be mapped
            return np.zeros(0, np.uint8)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): give the path of the data without .bin and .idx"
            ) from error
        self._files.append(file)
        return np.frombuffer(file.data, np.uint8)

    def _fail(self, problem: str) -> NoReturn:
        raise UserError(f"{self._idx} is not the index of a Megatron data set (it {problem}): prepare the data again")

    def _check_index(self, size: int, itemsize: int) -> None:
        """Check every entry against the size of the .bin file and of an id in bytes."""
        sizes = self._lengths.astype(np.int64) * itemsize
        ends = sizes.cumsum()
        if (sizes < 0).any() or (self._pointers != ends - sizes).any():
            self._fail("has a gap or an overlap between sequences")
        bounds = self._bounds
        if not len(bounds) or bounds[0] or bounds[-1] != len(sizes) or (bounds[1:] < bounds[:-1]).any():
            self._fail("has documents that do not cover all sequences in order")
        end = int(ends[-1]) if len(ends) else 0
        if end != size:
            raise UserError(
                f"{self._bin} has {size:,} bytes, but {self._idx} describes {end:,}: a file is truncated, or they "
                "belong to different data; prepare the data again"
            )
