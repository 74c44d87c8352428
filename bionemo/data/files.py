# SPDX-License-Identifier: Apache-2.0
"""Paths of the data files of each split. Imports no heavy dependency, so that missing files are reported at once."""

from collections.abc import Collection, Iterable, Sequence
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
from bionemo.data.shards.ranges import expand_range, list_names, shard_paths
from bionemo.data.store import fetch, is_url, local_path

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
FASTA_EXTENSIONS: tuple[str, ...] = (".fasta", ".fa", ".faa", ".fas")
SMILES_EXTENSIONS = (".smi", ".smiles", ".ism", ".can", ".cxsmiles")
_EXTENSIONS = {"fasta_fields_mmap": FASTA_EXTENSIONS, "parquet": (".parquet",)}  # of other readers than those of CSV


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


def split_files(config: ShardDataConfig, name: SplitName, download: bool = True) -> list[Path]:
    """Return the files of a split in reading order; none for mock data.

    With `download`, files of an object store are first copied to the local cache; see `store.fetch`.

    Raises:
        UserError: if files are missing; the message lists them.
    """
    split: SplitConfig = getattr(config, name)
    if split.data_impl == "mock":
        return []
    if download:
        _download(config, name)
    paths = shard_paths(_directory(config, name), name, split.range, _extension(split))
    reader = getattr(split.data_impl_kwargs, split.data_impl, None)
    return sorted(paths) if getattr(reader, "sort_dataset_paths", split.data_impl == "parquet") else paths


def _extension(split: SplitConfig) -> str:
    """Return the extension of a split's files that their configured names lack."""
    names = [split.range] if isinstance(split.range, str) else split.range
    extensions = _EXTENSIONS.get(split.data_impl, (".csv", *SMILES_EXTENSIONS))
    return "" if all(each.endswith(extensions) for each in names) else extensions[0]


def _download(config: ShardDataConfig, name: SplitName) -> None:
    """Copy the files of a split to the local cache if `model.data.dataset_path` is a URL."""
    root, split = config.dataset_path, getattr(config, name)
    if root is None or not is_url(root):
        return

    def choose(files: Collection[str]) -> list[str]:
        folder = f"{(split.dataset_path or root).removeprefix(root)}/{name}/".lstrip("/")
        if not any(file.startswith(folder) for file in files):
            folder = f"{name}/"  # as in `_directory`
        chosen = [folder + each for each in expand_range(split.range, _extension(split)) if each[0] != "/"]
        if f"{folder}counts.mmap" in files and split.uf90 and split.sample_from_map is not False:
            members = f"{split.uf90.uniref90_path.removeprefix(root)}/uf90_csvs/".lstrip("/")
            chosen = [file for file in files if file.startswith(folder)]
            chosen += [members + each for each in expand_range(split.uf90.dataset.uf90_csvs, ".csv")]
        if missing := [file for file in chosen if file not in files]:
            raise UserError(
                f"{len(missing)} of {len(chosen)} data files not found in {root}: {list_names(missing)}; it contains "
                f"{list_names(sorted(files)) or 'no files'}: correct model.data.dataset_path or "
                f"model.data.dataset.{name}"
            )
        return chosen

    fetch(root, f"{name} {split.range}", choose)


def cluster_members(config: ProteinDataConfig) -> list[Path] | None:
    """Return the files of the UniRef90 members if training samples them from clusters, else None.

    Raises:
        UserError: if files are missing; the message lists them.
    """
    train = config.train
    if train.data_impl == "mock":
        return None
    _download(config, "train")
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
    paths = shard_paths(
        local_path(train.uf90.uniref90_path, config.dataset_path), "uf90_csvs", train.uf90.dataset.uf90_csvs, ".csv"
    )
    return sorted(paths) if train.uf90.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths else paths


def _directory(config: ShardDataConfig, name: SplitName) -> Path:
    root = config.dataset_path
    common = root and local_path(root, root)
    directory = local_path(getattr(config, name).dataset_path or root or ".", root)
    if not common or not directory.is_relative_to(common) or (directory / name).is_dir():
        return directory
    # plain shards, without the uf50 directory of prepared UniRef50/90
    return common if (common / name).is_dir() or not directory.is_dir() else directory


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
