# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a split and its files to a source of sequences."""

from pathlib import Path

from bionemo.config.schema import SplitConfig, UF90Config
from bionemo.data.source import SequenceSource, open_source


def open_shards(split: SplitConfig | UF90Config, paths: list[Path]) -> SequenceSource:
    """Open the files of a split with the reader that its configuration names.

    Raises:
        UserError: for files that cannot be read as described.
    """
    if split.data_impl == "fasta_fields_mmap":
        return open_source(split.data_impl, paths, index_mapping_dir=split.index_mapping_dir)
    reader = getattr(split.data_impl_kwargs, split.data_impl)
    fields = split.data_impl == "csv_fields_mmap"
    column = {"data_fields": reader.data_fields} if fields else {"data_col": reader.data_col}
    return open_source(
        split.data_impl,
        paths,
        data_sep=reader.data_sep,
        header_lines=reader.header_lines,
        newline_int=reader.newline_int,
        index_mapping_dir=split.index_mapping_dir,
        workers=reader.workers or None,
        **column,
    )
