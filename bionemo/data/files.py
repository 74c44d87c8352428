# SPDX-License-Identifier: Apache-2.0
"""Paths of the data files of each split. Imports no heavy dependency, so that missing files are reported at once."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from bionemo.common.errors import UserError
from bionemo.config.schema import (
    DataConfig,
    MaskedDataConfig,
    ProteinDataConfig,
    ShardDataConfig,
    SplitConfig,
    TextDataConfig,
)
from bionemo.data.shards.ranges import shard_paths

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
FASTA_EXTENSIONS = (".fasta", ".fa", ".faa", ".fas")
SMILES_EXTENSIONS = (".smi", ".smiles", ".ism", ".can", ".cxsmiles")


def check_files_exist(config: DataConfig, names: Iterable[SplitName] = ("train", "val")) -> None:
    """Raise a UserError that lists the missing files of the splits."""
    if isinstance(config, MaskedDataConfig) and config.mixture:
        for of_source in source_configs(config).values():
            check_files_exist(of_source, names)
    elif isinstance(config, ShardDataConfig):
        for name in names:
            split_files(config, name)
    elif isinstance(config, TextDataConfig) and config.data_impl == "mmap":
        for prefix in parse_prefixes(config.data_prefix)[0]:
            for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
                if not path.is_file():
                    raise UserError(
                        f"{path} is missing: model.data.data_prefix gives paths of indexed files without .bin and "
                        ".idx; data@model.data=mock_text needs no files"
                    )


def source_configs(config: MaskedDataConfig) -> dict[str, MaskedDataConfig]:
    """Return the configuration of each source of a mixture as that of a single data set, in alphabetical order."""
    configs = {}
    for name, source in sorted((config.mixture or {}).items()):
        splits = {
            split: replace(
                getattr(config, split), dataset_path=source.dataset_path, range=getattr(source.dataset, split),
                data_impl=source.data_impl, data_impl_kwargs=source.data_impl_kwargs,
            )
            for split in SPLITS
        }  # fmt: skip
        configs[name] = replace(config, mixture=None, dataset_path=source.dataset_path, **splits)
    return configs


def split_files(config: ShardDataConfig, name: SplitName) -> list[Path]:
    """Return the files of a split in reading order; none for mock data.

    Raises:
        UserError: if files are missing; the message lists them.
    """
    split: SplitConfig = getattr(config, name)
    if split.data_impl == "mock":
        return []
    directory = _directory(config, name)
    names = [split.range] if isinstance(split.range, str) else split.range
    if split.data_impl == "fasta_fields_mmap":
        extension = "" if all(each.endswith(FASTA_EXTENSIONS) for each in names) else ".fasta"
        return shard_paths(directory, name, names, extension)
    if split.data_impl == "parquet":
        return sorted(shard_paths(directory, name, names, ".parquet"))
    is_smiles = all(each.endswith(SMILES_EXTENSIONS) for each in names)
    paths = shard_paths(directory, name, names, "" if is_smiles else ".csv")
    return sorted(paths) if getattr(split.data_impl_kwargs, split.data_impl).sort_dataset_paths else paths


def cluster_members(config: ProteinDataConfig) -> list[Path] | None:
    """Return the files of the UniRef90 members if training samples them from clusters, else None.

    Raises:
        UserError: if files are missing; the message lists them.
    """
    train = config.train
    if train.data_impl == "mock":
        return None
    directory = _directory(config, "train") / "train"
    prepared = train.uf90 is not None and (directory / "counts.mmap").is_file()
    if train.sample_from_map is False or not (prepared or train.sample_from_map):
        return None
    if train.uf90 is None:
        raise UserError("model.data.train.sample_from_map=True needs clusters: choose data@model.data=uniref50_90")
    if not prepared:
        raise UserError(
            f"{directory} has no counts.mmap: prepare UniRef50/90 with do_preprocessing=True, or train on UniRef50 "
            "alone with model.data.train.sample_from_map=False"
        )
    paths = shard_paths(Path(train.uf90.uniref90_path), "uf90_csvs", train.uf90.dataset.uf90_csvs, ".csv")
    return sorted(paths) if train.uf90.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths else paths


def _directory(config: ShardDataConfig, name: SplitName) -> Path:
    common = config.dataset_path
    directory = Path(getattr(config, name).dataset_path or common or ".")
    if not common or not directory.is_relative_to(common) or (directory / name).is_dir():
        return directory
    # plain shards, without the uf50 directory of prepared UniRef50/90
    return Path(common) if (Path(common) / name).is_dir() or not directory.is_dir() else directory


def parse_prefixes(data_prefix: str | Sequence[str | float]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Parse `model.data.data_prefix`: one prefix, several, or a weight before each as in `[0.3, a, 0.7, b]`.

    Returns the prefixes, and their weights or None.

    Raises:
        UserError: for any other form.
    """
    entries = [data_prefix] if isinstance(data_prefix, str) else list(data_prefix)
    numbers = [_parse_number(entry) for entry in entries]
    if entries and all(number is None for number in numbers):
        return tuple(map(str, entries)), None
    paths = [str(entry) for entry, number in zip(entries[1::2], numbers[1::2], strict=True) if number is None]
    weights = [number for number in numbers[::2] if number is not None and 0 < number < float("inf")]
    if not entries or not len(weights) == len(paths) == len(entries) / 2:
        raise UserError(
            f"model.data.data_prefix={entries}: give paths without .bin and .idx, or a weight above 0 before each, "
            "as in [0.3,a,0.7,b]"
        )
    return tuple(paths), tuple(weights)


def _parse_number(entry: str | float) -> float | None:
    try:
        return float(entry)
    except (TypeError, ValueError):
        return None
