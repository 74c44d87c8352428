# SPDX-License-Identifier: Apache-2.0
"""Parquet files: the column of the sequences is copied once to a text file, which is then read in place.

Training reads records in a random order, which row groups do not permit: to read one record, thousands are decoded.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.data.shards.formats import Csv
from bionemo.data.shards.index import UnwritableError, find_or_write, index_paths

_ROWS = 4096  # decoded at a time
_READ_BYTES = 1 << 20  # read at a time; by default, pyarrow reads a column of a whole row group
_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_SPECIAL = re.compile(rb'[\n\r",]')


@dataclass(frozen=True)
class Parquet(Csv):
    """Parquet, of which one column is read. The other fields are those of the text file; see `write_rows`."""

    column: str = "sequence"  # name of the column of the sequences


def write_rows(path: Path, column: str, index_mapping_dir: str | Path | None) -> Path:
    """Return a CSV file with the sequences of a parquet file as its second column; write it if it does not exist.

    Null is an empty sequence. The first line identifies the state of the parquet file, see `FileState`, and contains
    the size of the text file. Memory is bounded by the sequences of 4,096 rows and a page of the parquet file.

    Args:
        path: the parquet file.
        column: name of the column: text, bytes, or a dictionary of them.
        index_mapping_dir: directory of the text file; as `load_index`, but it is never in memory.

    Raises:
        UserError: if the file is damaged, has no rows or no such column, a sequence contains a line end, comma or
            quote, or the text file cannot be written.
    """
    spec = {"format": "parquet", "column": column}

    def read(target: Path, identity: str) -> Path | None:
        with suppress(OSError), target.open("rb") as file:
            return target if file.readline() == _header(identity, target.stat().st_size) else None
        return None

    def write(target: Path, identity: str) -> None:
        with replacing(target) as new, new.open("xb") as file:
            file.write(_header(identity, 0))
            file.writelines(_read_rows(path, column))
            size = file.tell()
            file.seek(0)
            file.write(_header(identity, size))

    try:
        return find_or_write(path, spec, index_paths(path, spec, index_mapping_dir, "rows"), read, write)
    except UnwritableError as error:
        raise UserError(
            f"the sequences of {path} cannot be copied to a text file ({error}): free disk space, or set "
            "model.data.index_mapping_dir to a directory to write to"
        ) from error


def _header(identity: str, size: int) -> bytes:
    return f"{xxh3_128(identity.encode()).hexdigest()},{size:020}\n".encode()


def _read_rows(path: Path, column: str) -> Iterator[bytes]:
    """Yield the rows of the text file."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            schema, number = file.schema_arrow, 0
            if schema.names.count(column) != 1:
                raise UserError(
                    f"{path} has no column {column!r}, but {', '.join(schema.names)}: set "
                    "data_impl_kwargs.parquet.column"
                )
            found = schema.field(column).type
            if str(found.value_type if pa.types.is_dictionary(found) else found) not in _TYPES:
                raise UserError(f"{path}: column {column!r} has the type {found}: sequences are text or bytes")
            if not file.metadata.num_rows:
                raise UserError(f"{path} has no rows: write it again, or exclude it from the range of files")
            for batch in file.iter_batches(_ROWS, columns=[column]):
                cells = batch.column(0)
                if pa.types.is_dictionary(found):  # the values of its codes differ between row groups
                    cells = cells.dictionary_decode()
                cells = pc.fill_null(cells.cast(pa.large_binary()), b"")
                rows = pa.LargeListArray.from_arrays([0, len(cells)], cells)
                text = b"," + pc.binary_join(rows, pa.scalar(b"\n,", pa.large_binary()))[0].as_py() + b"\n"
                if not text.count(b",") == text.count(b"\n") == len(cells) or b'"' in text or b"\r" in text:
                    place = next(i for i, cell in enumerate(cells.to_pylist()) if _SPECIAL.search(cell))
                    raise UserError(
                        f"{path}: the sequence in row {number + place} (counted from 0) contains a line end, comma or "
                        "quote: remove it"
                    )
                number += len(cells)
                yield text
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read as parquet ({' '.join(str(error).split())}): copy or write it again"
        ) from error
