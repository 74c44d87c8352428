# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed data sets: `<prefix>.bin`, token ids end to end, and `<prefix>.idx`, where documents begin.

The index, little-endian: the magic, version 1 (u64), a code for the type of ids (u8), the number of sequences n (u64)
and of document bounds m (u64); then the tokens of each sequence (i32 [n]), the byte of the .bin file where each begins
(i64 [n]), and the sequence with which each document begins, and n behind the last (i64 [m]). Files of GPT have one
sequence for each document. Both files are mapped into memory, and nothing in them is believed unchecked: a file of
another kind, or one that was cut off on the way, is told in one line.
"""

import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.index import Fingerprint

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)
_CHECKED = 1 << 20  # entries that are checked at a time


class IndexedTokens:
    """All tokens of an indexed data set, in the order of the file.

    Pickles as its name: another process maps the files again.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        tokens: [n] ids as they stand in the file, which maps them; integers of the file's type.
        documents: number of documents, empty ones among them.
    """

    tokens: NDArray[np.integer[Any]]

    def __init__(self, prefix: str | Path, *, check: bool = True) -> None:
        """Map the files.

        Args:
            prefix: path without `.bin` and `.idx`.
            check: look at every entry of the index; without it, only at the header and the sizes.

        Raises:
            UserError: files that are not there, or not what they should be.
        """
        self.prefix = str(prefix)
        self._files: list[MappedFile] = []
        self._index = self._mapped(self._idx)
        if len(self._index) < _HEADER.size:
            self._wrong("is too short")
        magic, version, code, sequences, bounds = _HEADER.unpack(self._index[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            self._wrong("does not begin with MMIDIDX")
        if version != _VERSION:
            self._wrong(f"has version {version}, not {_VERSION}")
        if code not in _TYPES:
            self._wrong("holds floating-point numbers, not ids" if code in _FLOATS else f"has the unknown type {code}")
        if len(self._index) != _HEADER.size + 12 * sequences + 8 * bounds:
            self._wrong(f"has {len(self._index):,} bytes, which are not {sequences:,} sequences, {bounds:,} bounds")

        self._lengths = np.frombuffer(self._index, "<i4", sequences, _HEADER.size)
        self._pointers = np.frombuffer(self._index, "<i8", sequences, _HEADER.size + 4 * sequences)
        self._bounds = np.frombuffer(self._index, "<i8", bounds, _HEADER.size + 12 * sequences)
        self.documents = bounds - 1
        data, dtype = self._mapped(self._bin), np.dtype(_TYPES[code])
        if check:
            self._check(len(data), dtype.itemsize)
        if len(data) % dtype.itemsize:
            self._wrong(f"is of other data: {self._bin} is cut off")
        self.tokens = data.view(dtype)

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped_again, (self.prefix,)

    def check(self) -> None:
        """See that the files are as long as they were when they were mapped; call it before reading `tokens`.

        Raises:
            UserError: see `MappedFile.check`.
        """
        for file in self._files:
            file.check()

    def document_begins(self, document: int) -> int:
        """Token with which a document begins; behind the last, the number of all tokens."""
        self.check()
        sequence = int(self._bounds[document])
        return len(self) if sequence == len(self._pointers) else int(self._pointers[sequence]) // self.tokens.itemsize

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data set from others: its size, and hashes of samples of both files."""
        hashes = [Fingerprint.of(Path(path)).blake2b for path in (self._bin, self._idx)]
        return {"tokens": len(self), "documents": self.documents, "hashes": hashes}

    @property
    def _idx(self) -> str:
        return f"{self.prefix}.idx"

    @property
    def _bin(self) -> str:
        return f"{self.prefix}.bin"

    def _mapped(self, path: str) -> NDArray[np.uint8]:
        """Bytes of a file."""
        try:
            file = MappedFile(path)
        except ValueError:  # an empty file cannot be mapped
            return np.zeros(0, np.uint8)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): name the data by its path without .bin and .idx"
            ) from error
        self._files.append(file)
        return np.frombuffer(file.data, np.uint8)

    def _wrong(self, what: str) -> NoReturn:
        raise UserError(f"{self._idx} is not the index of a Megatron data set ({what}): prepare the data again")

    def _check(self, size: int, itemsize: int) -> None:
        """Look at every entry, some of them at a time: an index may be larger than memory.

        Args:
            size: bytes of the .bin file.
            itemsize: bytes of an id.
        """
        sequences, end = len(self._lengths), 0
        for first in range(0, sequences, _CHECKED):
            lengths = self._lengths[first : first + _CHECKED]
            if lengths.min() < 0:
                self._wrong(f"sequence {first + int((lengths < 0).argmax())} has a negative length")
            ends = end + lengths.cumsum(dtype=np.int64) * itemsize
            if (other := self._pointers[first : first + _CHECKED] != ends - lengths.astype(np.int64) * itemsize).any():
                self._wrong(f"sequence {first + int(other.argmax())} does not begin where the one before it ends")
            end = int(ends[-1])
        if not len(self._bounds) or self._bounds[0] != 0 or self._bounds[-1] != sequences:
            self._wrong("its documents are not all of its sequences")
        for first in range(0, len(self._bounds), _CHECKED):
            if (np.diff(self._bounds[first : first + _CHECKED + 1]) < 0).any():
                self._wrong("its documents are not in order")
        if end != size:
            raise UserError(
                f"{self._bin} has {size:,} bytes, but {self._idx} is of one of {end:,}: one of them was cut off, or "
                "they are of different data; prepare them again"
            )


def _mapped_again(prefix: str) -> IndexedTokens:
    return IndexedTokens(prefix, check=False)
