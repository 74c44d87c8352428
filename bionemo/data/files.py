# SPDX-License-Identifier: Apache-2.0
"""Which files a split is read from; imports nothing heavy, so a missing one is named at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bionemo.common.errors import UserError
from bionemo.config.schema import DataConfig, ProteinDataConfig, ShardDataConfig, SplitConfig, TextDataConfig
from bionemo.data.shards.ranges import shard_paths

SplitName = Literal["train", "val", "test"]
_FASTA = (".fa", ".faa", ".fas")  # FASTA's other endings


def name_missing_files(config: DataConfig) -> None:
    """See that everything a training needs is there.

    Raises:
        UserError: naming every file that is missing.
    """
    if isinstance(config, ShardDataConfig):
        split_files(config, "train")
        split_files(config, "val")
    elif isinstance(config, TextDataConfig) and config.data_impl == "mmap":
        for prefix in parse_prefixes(config.data_prefix)[0]:
            for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
                if not path.is_file():
                    raise UserError(
                        f"{path} is missing: model.data.data_prefix names indexed files, less .bin and .idx; "
                        "data@model.data=mock_text needs none"
                    )


def split_files(config: ShardDataConfig, name: SplitName) -> list[Path]:
    """Give the files of a split in the order they are read; none for data that is made up.

    Raises:
        UserError: naming every file that is missing.
    """
    split: SplitConfig = getattr(config, name)
    if split.data_impl == "mock":
        return []
    directory = _directory(config, name)
    if split.data_impl == "fasta_fields_mmap":
        names = [split.range] if isinstance(split.range, str) else split.range
        return shard_paths(directory, name, names, "" if all(each.endswith(_FASTA) for each in names) else ".fasta")
    paths = shard_paths(directory, name, split.range, ".csv")
    return sorted(paths) if getattr(split.data_impl_kwargs, split.data_impl).sort_dataset_paths else paths


def training_files(config: ShardDataConfig) -> list[Path]:
    """Give the files of the training split, to compare others with; none where they are not there."""
    try:
        return split_files(config, "train")
    except UserError:
        return []


def cluster_members(config: ProteinDataConfig) -> list[Path] | None:
    """Give the files of the UniRef90 members when training draws them from clusters, else None.

    Raises:
        UserError: naming every file that is missing.
    """
    train = config.train
    there = train.uf90 is not None and (_directory(config, "train") / "train" / "counts.mmap").is_file()
    if train.sample_from_map is False or not (there or train.sample_from_map):
        return None
    if train.uf90 is None:
        raise UserError("model.data.train.sample_from_map=True needs clusters: choose data@model.data=uniref50_90")
    if not there:
        raise UserError(
            f"{_directory(config, 'train') / 'train'} has no counts.mmap: prepare UniRef50/90 with "
            "do_preprocessing=True, or train on UniRef50 alone with model.data.train.sample_from_map=False"
        )
    paths = shard_paths(Path(train.uf90.uniref90_path), "uf90_csvs", train.uf90.dataset.uf90_csvs, ".csv")
    return sorted(paths) if train.uf90.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths else paths


def _directory(config: ShardDataConfig, name: SplitName) -> Path:
    common = config.dataset_path
    directory = Path(getattr(config, name).dataset_path or common or ".")
    if common and not (directory / name).is_dir() and (Path(common) / name).is_dir():
        return Path(common)  # plain shards, without the uf50/ that preparing UniRef50/90 makes
    return directory


def parse_prefixes(data_prefix: str | Sequence[str | float]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Read `model.data.data_prefix`: a prefix, several, or a weight before each as in `[0.3, a, 0.7, b]`.

    Returns:
        Prefixes, and their weights; None where there are none.

    Raises:
        UserError: when it is neither.
    """
    entries = [data_prefix] if isinstance(data_prefix, str) else list(data_prefix)
    weights = [_number(entry) for entry in entries]
    if entries and all(weight is None for weight in weights):
        return tuple(map(str, entries)), None
    paths = [str(entry) for entry, weight in zip(entries[1::2], weights[1::2], strict=True) if weight is None]
    found = [weight for weight in weights[::2] if weight is not None and 0 < weight < float("inf")]
    if not entries or not len(found) == len(paths) == len(entries) / 2:
        raise UserError(
            f"model.data.data_prefix={entries}: give paths without .bin and .idx, or a weight above 0 before each, "
            "as in [0.3,a,0.7,b]"
        )
    return tuple(paths), tuple(found)


def _number(entry: str | float) -> float | None:
    try:
        return float(entry)
    except (TypeError, ValueError):
        return None
