# SPDX-License-Identifier: Apache-2.0
"""Which files a split is read from; imports nothing heavy, so a missing one is named at once."""

from pathlib import Path
from typing import Literal

from bionemo.config.schema import DataConfig, SplitConfig
from bionemo.data.ranges import shard_paths

SplitName = Literal["train", "val", "test"]
_FASTA = (".fa", ".faa", ".fas")  # FASTA's other endings


def split_files(config: DataConfig, name: SplitName) -> list[Path]:
    """Give the files of a split in the order they are read; none for data that is made up.

    Raises:
        UserError: naming every file that is missing.
    """
    split: SplitConfig = getattr(config, name)
    if split.data_impl == "mock":
        return []
    common = config.dataset_path
    directory = Path(split.dataset_path or common or ".")
    if common and not (directory / name).is_dir() and (Path(common) / name).is_dir():
        directory = Path(common)  # plain shards, without the uf50/ that preparing UniRef50/90 makes
    if split.data_impl == "fasta_fields_mmap":
        names = [split.range] if isinstance(split.range, str) else split.range
        return shard_paths(directory, name, names, "" if all(each.endswith(_FASTA) for each in names) else ".fasta")
    paths = shard_paths(directory, name, split.range, ".csv")
    return sorted(paths) if getattr(split.data_impl_kwargs, split.data_impl).sort_dataset_paths else paths
