# SPDX-License-Identifier: Apache-2.0
"""Directories of runs: of one run, and different ones for the runs of a sweep."""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.config.overrides import quote
from bionemo.config.schema import ExpManagerConfig

_MAX_NAME = 200  # characters of the name of a directory


def log_directory(config: ExpManagerConfig) -> Path:
    """Return the log directory of a run: explicit_log_dir, else exp_dir/name[/version]."""
    if config.explicit_log_dir:
        return Path(config.explicit_log_dir).absolute()
    parent = Path(config.exp_dir or "nemo_experiments").absolute()
    return parent / (config.name or "default") / (config.version or "")


def checkpoint_directory(config: ExpManagerConfig) -> Path:
    """Return the directory of a run's checkpoints: dirpath, else `checkpoints` in the log directory."""
    dirpath = config.checkpoint_callback_params.dirpath
    return Path(dirpath).absolute() if dirpath else log_directory(config) / "checkpoints"


def directory_overrides(jobs: Sequence[Sequence[str]], configs: Sequence[ExpManagerConfig]) -> list[list[str]]:
    """Return overrides that give each run of a sweep its own directory; empty lists if the directories differ.

    Where two runs have the same directory, each gets a directory inside it, named after its values, such as
    `model.optim.lr=1e-4`, and this name in Weights & Biases and MLflow.
    """
    directories = [log_directory(config) for config in configs]
    if len(set(directories)) == len(jobs):
        return [[] for _ in jobs]
    shared = set.intersection(*(set(job) for job in jobs))
    added = []
    for job, directory, config in zip(jobs, directories, configs, strict=True):
        values = ",".join(override.lstrip("+") for override in job if override not in shared)
        name = re.sub(r"[^\w.,=+-]+", "_", values)[:_MAX_NAME]
        path = quote(str(directory / name))
        added.append([f"++exp_manager.exp_dir={path}", f"++exp_manager.explicit_log_dir={path}"])
        if config.create_wandb_logger:
            added[-1].append(f"++exp_manager.wandb_logger_kwargs.name={quote(name)}")
        if config.create_mlflow_logger:
            added[-1].append(f"++exp_manager.mlflow_logger_kwargs.run_name={quote(name)}")
    return added


def check_different_directories(configs: Sequence[ExpManagerConfig]) -> None:
    """Check that no two runs of a sweep write to the same directory.

    Raises:
        UserError: if two do: the second one would resume from the checkpoints of the first one.
    """
    places = {
        "exp_manager.exp_dir": log_directory,
        "exp_manager.checkpoint_callback_params.dirpath": checkpoint_directory,
    }
    for key, place in places.items():
        for (first, one), (second, other) in combinations(enumerate(map(place, configs), 1), 2):
            if one == other:
                raise UserError(
                    f"runs {first} and {second} have the same directory {one}: add a value in which they differ to "
                    f"{key}, such as ${{model.optim.lr}}"
                )
