# SPDX-License-Identifier: Apache-2.0
"""Output files of predictions, in the order of the input.

    .npz .h5       `id` [N], `tokens` [N], outputs per sequence [N, ...], outputs per token [all tokens, ...], of
                   which sequence i has `offsets`[i] to `offsets`[i + 1]; generated molecules are text
    .parquet       a row for each sequence, lists for vectors and samples
    .csv           a row for each sequence, a column for each number or text
    .pkl           v1's format: a list of dictionaries, hiddens [n, D] in each
    h5_by_id       a .h5 file with a data set for each id: [D] for outputs per sequence, [n, D] for outputs per token,
                   [heads, n, n] for attention maps

N sequences. All formats except .pkl are written part by part, in bounded memory. The provenance, see `fingerprint`, is
JSON text: an array `provenance` [] of a .npz file, an attribute of a .h5 file, an entry of the attributes of pandas in
a .parquet file, and a file NAME.json beside a .csv or .pkl file.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from safetensors import safe_open

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.inference.array_descriptions import describe
from bionemo.inference.deferred_errors import defer_errors
from bionemo.inference.fingerprint import write_provenance
from bionemo.inference.input_records import Record, Records
from bionemo.inference.outputs import GENERATED, is_per_token, split_rows
from bionemo.inference.part_files import COMPLETE
from bionemo.inference.text_outputs import decode_texts

FORMATS = ("npz", "h5", "csv", "parquet", "pkl")
BY_ID = "h5_by_id"


class ResultPart(NamedTuple):
    """Outputs of consecutive sequences."""

    records: list[Record]  # names and texts of the sequences
    tokens: np.ndarray  # [k] int64, number of tokens of each
    # Outputs, see `InferenceModel.compute`; generated molecules are text [k] or [k, samples].
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class PredictionResults:
    """All outputs of a prediction, in part files that follow the order of the records."""

    files: list[Path]
    records: Records
    outputs: list[str]
    provenance: dict[str, Any]  # see `provenance`

    def __iter__(self) -> Iterator[ResultPart]:
        """Read the parts in order."""
        for file in self.files:
            with safe_open(file, framework="np") as opened:
                numbers = opened.get_tensor("numbers")
                columns = {name: decode_texts(opened.get_tensor(name)) for name in self.outputs}
                yield ResultPart(self._records(numbers), opened.get_tensor("tokens"), columns)

    def _records(self, numbers: np.ndarray) -> list[Record]:
        if not len(numbers):
            return []
        first = int(numbers[0])
        wanted = set(numbers.tolist())
        read = self.records.read(first, int(numbers[-1]) + 1)
        return [record for number, record in enumerate(read, first) if number in wanted]

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Read one output, part by part."""
        for file in self.files:
            with safe_open(file, framework="np") as opened:
                yield decode_texts(opened.get_tensor(name))

    def texts(self, name: str) -> Iterator[tuple[Record, list[str]]]:
        """Yield each record of the input and the texts generated from it."""
        for part in self:
            for record, generated in zip(part.records, part.columns[name], strict=True):
                yield record, [generated] if generated.ndim == 0 else generated.tolist()

    @cached_property
    def ids(self) -> list[str]:
        """Names of all sequences, [N]."""
        return [record.id for part in self for record in part.records]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Number of tokens of each sequence, [N] int64."""
        return np.concatenate(list(self.column("tokens")))

    @property
    def offsets(self) -> np.ndarray:
        """First token of each sequence, and the total, [N + 1] int64."""
        return np.concatenate([np.zeros(1, np.int64), self.tokens.cumsum()])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an output of all sequences."""
        rows = int(self.tokens.sum()) if is_per_token(name) else len(self.tokens)
        return rows, *next(self.column(name)).shape[1:]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of an output of all sequences: fp32, or text as long as the longest."""
        if name not in GENERATED:
            return np.dtype("<f4")
        return np.result_type(*(values.dtype for values in self.column(name)))


def write_results(path: Path, file_format: str, results: PredictionResults, directory: Path | None = None) -> None:
    """Write all outputs to a file in one of FORMATS atomically.

    With the `directory` of the part files, on the same file system, the file is written there and remains hard-linked
    there as COMPLETE; otherwise it is written beside `path`.

    Raises:
        OSError: if it cannot be written.
    """
    with replacing(path, directory) as new:
        _WRITERS[file_format](new, results)
        if directory is not None:
            with suppress(OSError):  # a file system without hard links
                (directory / COMPLETE).unlink(missing_ok=True)
                os.link(new, directory / COMPLETE)
        if file_format in ("csv", "pkl"):
            write_provenance(path, results.provenance)


def _npz(path: Path, results: PredictionResults) -> None:
    with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:

        def member(name: str) -> IO[bytes]:
            return archive.open(f"{name}.npy", "w", force_zip64=True)

        for name, array in {**_index(results), "provenance": np.array(json.dumps(results.provenance))}.items():
            with member(name) as opened:
                npy.write_array(opened, array, allow_pickle=False)
        for name in results.outputs:
            with member(name) as opened:
                dtype = results.dtype(name)
                header = {"descr": dtype.str, "fortran_order": False, "shape": results.shape(name)}
                npy.write_array_header_2_0(opened, header)
                for values in results.column(name):
                    opened.write(np.ascontiguousarray(values, dtype).tobytes())


def _h5(path: Path, results: PredictionResults) -> None:
    import h5py

    with defer_errors(path) as target, h5py.File(target, "w") as file:
        file.attrs["provenance"] = json.dumps(results.provenance)
        for name, array in _index(results).items():
            is_text = array.dtype.kind == "U"
            data, dtype = (results.ids, h5py.string_dtype()) if is_text else (array, None)
            file.create_dataset(name, data=data, dtype=dtype)
        for name in results.outputs:
            is_text = name in GENERATED
            dataset = file.create_dataset(name, results.shape(name), h5py.string_dtype() if is_text else "float32")
            begin = 0
            for values in results.column(name):
                dataset[begin : begin + len(values)] = values.astype(object) if is_text else values
                begin += len(values)
                target.raise_error()
        for name, dataset in file.items():
            dataset.attrs["description"] = describe(name)


def check_ids(records: Records, outputs: Sequence[str]) -> None:
    """Check that a .h5 file can have a data set for each id.

    Raises:
        UserError: if two data sets would have the same name, or there are several outputs.
    """
    if len(outputs) > 1 or set(outputs) & {*GENERATED}:
        raise UserError(
            f"output_format={BY_ID} holds one array for each id, not {', '.join(outputs)}: set a single output in "
            "model.downstream_task.outputs, and not reconstruction or samples"
        )
    numbers: dict[str, int] = {}
    for number, record in enumerate(records.read(0, len(records))):
        if (first := numbers.setdefault(_data_set_name(record.id), number)) != number:
            raise UserError(
                f"records {first:,} and {number:,} have the same id {record.id[:60]!r}, of which a .h5 file has one "
                f"data set: give them different ids, or write another format than output_format={BY_ID}"
            )


def _data_set_name(name: str) -> str:
    """Return the name of the data set of an id: '/' would create groups, '.' is the group itself."""
    return name.replace("/", "_").replace("\0", "_") if name != "." else "_"


def _h5_by_id(path: Path, results: PredictionResults) -> None:
    import h5py

    (output,) = results.outputs
    with defer_errors(path) as target, h5py.File(target, "w") as file:
        file.attrs.update({
            "description": f"{output} of each sequence", "provenance": json.dumps(results.provenance)
        })  # fmt: skip
        for part in results:
            rows = split_rows(output, part.columns[output], part.tokens)
            for record, row in zip(part.records, rows, strict=True):
                data_set = file.create_dataset(_data_set_name(record.id), data=row)
                data_set.attrs["original_id"] = record.id  # where bio_embeddings and biotrainer read the id
            target.raise_error()


def _index(results: PredictionResults) -> dict[str, np.ndarray]:
    found = {"id": np.array(results.ids, np.str_), "tokens": results.tokens}
    return found | ({"offsets": results.offsets} if any(map(is_per_token, results.outputs)) else {})


def _csv(path: Path, results: PredictionResults) -> None:
    import pyarrow as pa
    from pyarrow import csv

    def table(part: ResultPart) -> pa.Table:
        columns: dict[str, Any] = {"id": [record.id for record in part.records], "tokens": part.tokens}
        for name, values in part.columns.items():
            numbers = {name: values} if values.ndim == 1 else {f"{name}_{i}": x for i, x in enumerate(values.T)}
            columns |= {key: np.ascontiguousarray(x) for key, x in numbers.items()}
        return pa.table(columns)

    options = csv.WriteOptions(quoting_style="needed")
    _write_tables(path, results, table, lambda file, schema: csv.CSVWriter(file, schema, write_options=options))


def _parquet(path: Path, results: PredictionResults) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def vectors(values: np.ndarray) -> pa.Array:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def table(part: ResultPart) -> pa.Table:
        offsets = pa.array(np.concatenate([[0], part.tokens.cumsum()]).astype(np.int64))
        columns: dict[str, Any] = {"id": [record.id for record in part.records], "tokens": part.tokens}
        for name, values in part.columns.items():
            rows = vectors(values)
            columns[name] = pa.LargeListArray.from_arrays(offsets, rows) if is_per_token(name) else rows
        return pa.table(columns, metadata={"PANDAS_ATTRS": json.dumps({"provenance": results.provenance})})

    _write_tables(path, results, table, parquet.ParquetWriter)


def _write_tables(
    path: Path, results: PredictionResults, make_table: Callable[[ResultPart], Any],
    make_writer: Callable[[IO[bytes], Any], Any],
) -> None:  # fmt: skip
    """Write a table for each part with one writer."""
    parts = iter(results)
    first = make_table(next(parts))
    with path.open("xb") as file, make_writer(file, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(make_table(part))


def _pkl(path: Path, results: PredictionResults) -> None:
    def convert(name: str, value: Any) -> Any:
        return value.tolist() if name in GENERATED else np.array(value)

    found: list[dict[str, Any]] = []
    for part in results:
        rows: Mapping[str, Any] = {
            name: split_rows(name, values, part.tokens) for name, values in part.columns.items()
        }
        found += [
            {"id": record.id, "sequence": record.text, **{name: convert(name, rows[name][i]) for name in rows}}
            for i, record in enumerate(part.records)
        ]
    with path.open("xb") as file:
        pickle.dump(found, file)


_WRITERS: dict[str, Callable[[Path, PredictionResults], None]] = {
    "npz": _npz, "h5": _h5, "csv": _csv, "parquet": _parquet, "pkl": _pkl, BY_ID: _h5_by_id,
}  # fmt: skip
