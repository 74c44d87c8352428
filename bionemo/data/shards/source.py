# SPDX-License-Identifier: Apache-2.0
"""Interface of sequence sources; opens the files of a split with the configured reader and finds duplicate files."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from bionemo.common.errors import UserError
from bionemo.config.schema import ShardDataConfig, SplitConfig, UF90Config
from bionemo.data.columns import PROTEINS, SMILES, CsvColumns, SequenceKind, check_columns
from bionemo.data.files import SMILES_EXTENSIONS, SplitName, split_files
from bionemo.data.shards.formats import Csv, Fasta
from bionemo.data.shards.index import FileState
from bionemo.data.shards.parquet import Parquet
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.smiles_format import find_formats
from bionemo.data.store import is_url

_SAMPLE, _SAMPLED_LETTERS = 64, 256  # records, and letters of each, of a digest


class LetterSource(Protocol):
    """Random access to the letters of numbered sequences."""

    lengths: np.ndarray  # int32 [n], letters (residues without white space and stop codons, or bytes of text)

    def gather(
        self, records: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, offsets: np.ndarray
    ) -> None:
        """Copy letters [start, start + count) of each record into out[offset : offset + count].

        All arrays are integer [k], except `out`, uint8 [m], which is contiguous. Records may be in any order and occur
        several times.
        """


class SequenceSource(LetterSource, Protocol):
    """Random access to numbered sequences and their other fields."""

    def __len__(self) -> int:
        """Return the number of records."""

    def fields(self, record: int) -> dict[str, str]:
        """Return all fields of a record, including its sequence."""


def read_prefixes(
    source: LetterSource, records: np.ndarray, max_letters: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read the first letters of records [k]; return all letters, uint8 [m], and their starts, int64 [k]."""
    counts = source.lengths[records].astype(np.int64)
    counts = counts if max_letters is None else np.minimum(counts, max_letters)
    starts = counts.cumsum() - counts
    letters = np.empty(int(counts.sum()), np.uint8)
    source.gather(records, np.zeros_like(counts), counts, letters, starts)
    return letters, starts


def digest_sample(source: LetterSource) -> str:
    """Return a digest of the first letters of some records, which distinguishes data sets with equal lengths."""
    records = np.unique(np.linspace(0, len(source.lengths) - 1, _SAMPLE).astype(np.int64))
    return xxhash.xxh3_128(read_prefixes(source, records, _SAMPLED_LETTERS)[0].data).hexdigest()


def open_shards(
    split: SplitConfig | UF90Config,
    paths: list[Path],
    *,
    keys: str,
    expected: SequenceKind | None,
    sequences: Sequence[str] | None = None,
) -> TextRecords:
    """Open the files of a split with the configured reader, and index those without a valid index.

    Args:
        split: configuration of the split.
        paths: its files; their records are numbered consecutively in this order.
        keys: prefix of the configuration keys in error messages, such as `model.data.train`.
        expected: kind of sequences, with which the first records of CSV files are compared; None: no check, because
            the sequences are not read.
        sequences: csv_fields_mmap: the fields that hold sequences; None: `sequence`, else the first field.

    Raises:
        UserError: if the files cannot be read with the configured reader.
    """
    directory = None if is_url(split.index_mapping_dir) else split.index_mapping_dir
    if split.data_impl == "fasta_fields_mmap":
        return TextRecords(paths, Fasta(), index_mapping_dir=directory)
    if split.data_impl == "parquet":
        return TextRecords(
            paths,
            Parquet({"sequence": 1}, proteins=expected is PROTEINS, column=split.data_impl_kwargs.parquet.column),
            index_mapping_dir=directory,
        )
    if expected is SMILES and all(path.suffix in SMILES_EXTENSIONS for path in paths):
        return TextRecords(paths, find_formats(paths), index_mapping_dir=directory)
    key, reader = f"{keys}.data_impl_kwargs.{split.data_impl}", getattr(split.data_impl_kwargs, split.data_impl)
    columns = {"sequence": reader.data_col} if split.data_impl == "csv_mmap" else dict(reader.data_fields)
    if not columns:
        raise UserError(f"{key}.data_fields is empty: name its columns, as in {{sequence: 3, id: 1}}")
    if expected is not None:
        names = sequences or [name for name in columns if name == "sequence"] or list(columns)[:1]
        checked = {name: columns[name] for name in names if name in columns}
        settings = CsvColumns(key, checked, reader.data_sep, chr(reader.newline_int), reader.header_lines)
        check_columns(paths, settings, expected)
    text_format = Csv(
        columns, reader.data_sep, reader.header_lines, chr(reader.newline_int), proteins=expected is PROTEINS
    )
    return TextRecords(paths, text_format, index_mapping_dir=directory, workers=reader.workers or None)


def duplicate_notes(config: ShardDataConfig, name: SplitName, paths: Sequence[Path]) -> list[str]:
    """Return notes about files of a split with the same content as each other or as training files, if these exist."""
    training: list[Path] = []
    with suppress(UserError):
        training = [] if name == "train" else split_files(config, "train", download=False)
    sizes = Counter(path.stat().st_size for path in (*training, *paths))
    first: dict[str, Path] = {}
    repeated, known = [], []
    for number, path in enumerate([*training, *paths]):
        if sizes[path.stat().st_size] == 1:
            continue
        other = first.setdefault(FileState.of(path).blake2b, path)
        if number < len(training):
            continue
        if other in training:
            known.append(f"{path} has the same content as the training file {other}")
        elif other is not path:
            repeated.append(f"{path} has the same content as {other}")
    notes = []
    if repeated:
        notes.append(f"{name} data: {repeated[0]}{_more(repeated)}: its records count twice")
    if known:
        problem = f"the {name} loss does not measure generalization"
        notes.append(f"{name} data: {known[0]}{_more(known)}: {problem}")
    return notes


def _more(found: Sequence[str]) -> str:
    return f" (and {len(found) - 1} more files)" if len(found) > 1 else ""
