# SPDX-License-Identifier: Apache-2.0
"""Files that take what was computed, in the order of the input.

    .npz .h5 .pt   `id` [N], `tokens` [N], what there is of each sequence [N, ...], what there is of each token
                   [tokens of all, ...]; those of sequence i begin at `offsets`[i] and end before `offsets`[i + 1];
                   what was written is text, in .pt lists of it
    .parquet       a row for each sequence, lists for vectors and samples
    .csv           a row for each sequence, a column for each number or text
    .pkl           v1's: a list of dictionaries, hiddens [n, D] in each

N sequences. All but .pt and .pkl are written part by part, whatever their size.
"""

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.inference.late_errors import written_to
from bionemo.inference.outputs import PER_TOKEN, WRITTEN
from bionemo.inference.parts import COMPLETE
from bionemo.inference.records import Record, Records
from bionemo.inference.text_outputs import from_bytes

FORMATS = ("npz", "h5", "pt", "csv", "parquet", "pkl")


class Part(NamedTuple):
    """Some sequences, and what was computed of them.

    Attributes:
        records: their names and texts.
        tokens: [k] int64 tokens that were read of each.
        columns: see TrainedModel.compute; of what was written, text [k] or [k, samples].
    """

    records: list[Record]
    tokens: np.ndarray
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Results:
    """All parts, each in a file of its own.

    Attributes:
        files: in order.
        records: of the input.
        outputs: names of the columns.
    """

    files: list[Path]
    records: Records
    outputs: list[str]

    def __iter__(self) -> Iterator[Part]:
        """Open them one after the other."""
        for file in self.files:
            with safe_open(file, framework="np") as opened:
                numbers = opened.get_tensor("numbers")
                columns = {name: from_bytes(opened.get_tensor(name)) for name in self.outputs}
                yield Part(self._records(numbers), opened.get_tensor("tokens"), columns)

    def _records(self, numbers: np.ndarray) -> list[Record]:
        if not len(numbers):
            return []
        first = int(numbers[0])
        wanted = set(numbers.tolist())
        read = self.records.read(first, int(numbers[-1]) + 1)
        return [record for number, record in enumerate(read, first) if number in wanted]

    def column(self, name: str) -> Iterator[np.ndarray]:
        """One column, part by part."""
        for file in self.files:
            with safe_open(file, framework="np") as opened:
                yield from_bytes(opened.get_tensor(name))

    def texts(self, name: str) -> Iterator[tuple[str, list[str]]]:
        """What was read of each sequence, and what was written for it."""
        for part in self:
            for record, written in zip(part.records, part.columns[name], strict=True):
                yield record.text.strip(), [written] if written.ndim == 0 else written.tolist()

    @cached_property
    def ids(self) -> list[str]:
        """Names of all sequences."""
        return [record.id for part in self for record in part.records]

    @cached_property
    def tokens(self) -> np.ndarray:
        """[N] int64."""
        return np.concatenate(list(self.column("tokens")))

    @property
    def offsets(self) -> np.ndarray:
        """[N + 1] int64."""
        return np.concatenate([np.zeros(1, np.int64), self.tokens.cumsum()])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole column."""
        rows = int(self.tokens.sum()) if name in PER_TOKEN else len(self.tokens)
        return rows, *next(self.column(name)).shape[1:]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of a whole column: fp32, or text as long as the longest."""
        if name not in WRITTEN:
            return np.dtype("<f4")
        return np.result_type(*(values.dtype for values in self.column(name)))


def write(path: Path, kind: str, results: Results, directory: Path | None = None) -> None:
    """Write everything to a file, which appears when it is complete.

    Args:
        path: the file.
        kind: one of FORMATS.
        results: what is written.
        directory: of the parts, on the same file system: the file is there until it is complete, and remains linked
            there as COMPLETE; None: beside `path`.

    Raises:
        UserError: when a table of numbers cannot hold it.
        OSError: when it cannot be written.
    """
    if kind == "csv" and (tokens := [name for name in results.outputs if name in PER_TOKEN]):
        raise UserError(
            f"a CSV file has a row for each sequence, and no place for {tokens[0]}: write .parquet or .npz"
        )
    with replacing(path, directory) as new:
        _WRITERS[kind](new, results)
        if directory is not None:
            with suppress(OSError):  # a file system without hard links
                (directory / COMPLETE).unlink(missing_ok=True)
                os.link(new, directory / COMPLETE)


def _npz(path: Path, results: Results) -> None:
    with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:

        def member(name: str) -> IO[bytes]:
            return archive.open(f"{name}.npy", "w", force_zip64=True)

        for name, array in _index(results).items():
            with member(name) as opened:
                npy.write_array(opened, array, allow_pickle=False)
        for name in results.outputs:
            with member(name) as opened:
                dtype = results.dtype(name)
                header = {"descr": dtype.str, "fortran_order": False, "shape": results.shape(name)}
                npy.write_array_header_2_0(opened, header)
                for values in results.column(name):
                    opened.write(np.ascontiguousarray(values, dtype).tobytes())


def _h5(path: Path, results: Results) -> None:
    import h5py

    with written_to(path) as target, h5py.File(target, "w") as file:
        for name, array in _index(results).items():
            text = array.dtype.kind == "U"
            file.create_dataset(name, data=results.ids if text else array, dtype=h5py.string_dtype() if text else None)
        for name in results.outputs:
            text = name in WRITTEN
            dataset = file.create_dataset(name, results.shape(name), h5py.string_dtype() if text else "float32")
            begin = 0
            for values in results.column(name):
                dataset[begin : begin + len(values)] = values.astype(object) if text else values
                begin += len(values)
                target.raise_error()


def _pt(path: Path, results: Results) -> None:
    numbers = {name: torch.from_numpy(array) for name, array in _index(results).items() if name != "id"}
    whole = {name: np.concatenate(list(results.column(name))) for name in results.outputs}
    values = {name: each.tolist() if name in WRITTEN else torch.from_numpy(each) for name, each in whole.items()}
    with written_to(path) as target:
        torch.save({"id": results.ids, **numbers, **values}, target)  # type: ignore[arg-type]


def _index(results: Results) -> dict[str, np.ndarray]:
    found = {"id": np.array(results.ids, np.str_), "tokens": results.tokens}
    return found | ({"offsets": results.offsets} if set(results.outputs) & {*PER_TOKEN} else {})


def _csv(path: Path, results: Results) -> None:
    import pyarrow as pa
    from pyarrow import csv

    def table(part: Part) -> pa.Table:
        columns: dict[str, Any] = {"id": [record.id for record in part.records], "tokens": part.tokens}
        for name, values in part.columns.items():
            numbers = {name: values} if values.ndim == 1 else {f"{name}_{i}": x for i, x in enumerate(values.T)}
            columns |= {key: np.ascontiguousarray(x) for key, x in numbers.items()}
        return pa.table(columns)

    options = csv.WriteOptions(quoting_style="needed")
    _tables(path, results, table, lambda file, schema: csv.CSVWriter(file, schema, write_options=options))


def _parquet(path: Path, results: Results) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def vectors(values: np.ndarray) -> pa.Array:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def table(part: Part) -> pa.Table:
        offsets = pa.array(np.concatenate([[0], part.tokens.cumsum()]).astype(np.int64))
        columns: dict[str, Any] = {"id": [record.id for record in part.records], "tokens": part.tokens}
        for name, values in part.columns.items():
            rows = vectors(values)
            columns[name] = pa.LargeListArray.from_arrays(offsets, rows) if name in PER_TOKEN else rows
        return pa.table(columns)

    _tables(path, results, table, parquet.ParquetWriter)


def _tables(
    path: Path, results: Results, table: Callable[[Part], Any], opened: Callable[[IO[bytes], Any], Any]
) -> None:
    """Write a table of each part with one writer."""
    parts = iter(results)
    first = table(next(parts))
    with path.open("xb") as file, opened(file, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(table(part))


def _pkl(path: Path, results: Results) -> None:
    def one(name: str, value: Any) -> Any:
        return value.tolist() if name in WRITTEN else np.array(value)

    found: list[dict[str, Any]] = []
    for part in results:
        rows: Mapping[str, Any] = {
            name: np.split(values, part.tokens.cumsum()[:-1]) if name in PER_TOKEN else values
            for name, values in part.columns.items()
        }
        found += [
            {"id": record.id, "sequence": record.text, **{name: one(name, rows[name][i]) for name in rows}}
            for i, record in enumerate(part.records)
        ]
    with path.open("xb") as file:
        pickle.dump(found, file)


_WRITERS: dict[str, Callable[[Path, Results], None]] = {
    "npz": _npz, "h5": _h5, "pt": _pt, "csv": _csv, "parquet": _parquet, "pkl": _pkl,
}  # fmt: skip
