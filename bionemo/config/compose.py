# SPDX-License-Identifier: Apache-2.0
"""Hydra composes, we check: a typed config, or a UserError of one line."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.common.redaction import learn
from bionemo.config.check import check, secret_names
from bionemo.config.explain import explain
from bionemo.config.file_source import CheckedFileSource
from bionemo.config.legacy import notice
from bionemo.config.legacy_downstream import chooses_task, make_room, take_places
from bionemo.config.overrides import rewrite
from bionemo.config.paths import Source, source
from bionemo.config.permissions import check_permissions
from bionemo.config.references import check_lookups
from bionemo.config.schema import DownstreamConfig, RunConfig
from bionemo.config.search_path import register
from bionemo.config.typed import Reader

T = TypeVar("T")
_SHOWN = 3  # mistakes told at once


def load(
    config_name: str,
    overrides: Iterable[str] = (),
    config_dir: str | Path | None = None,
    schema: type[T] = RunConfig,  # type: ignore[assignment]
) -> T:
    """Compose and check a config, for notebooks and tests.

    Args:
        config_name: name of a file in `config_dir`.
        overrides: as on a command line.
        config_dir: directory of the file; by default the package's own and its examples' are searched.
        schema: the dataclass it is typed as.

    Raises:
        UserError: at any mistake.
    """
    where = source(config_name, config_dir)
    return typed(where, rewritten(where, overrides), schema)[0]


def rewritten(where: Source, overrides: Iterable[str], sweep: bool = False) -> list[str]:
    """Give the words of a command line as Hydra wants them.

    Raises:
        UserError: when one is no override.
    """
    with _hydra(where) as loader:
        return [rewrite(word, loader.get_group_options, sweep) for word in overrides]


def sweep_jobs(where: Source, words: Sequence[str]) -> list[list[str]]:
    """Every combination of a sweep, each as the words of a run.

    Raises:
        UserError: when other means of sweeping are asked for.
    """
    if other := [word for word in words if word.startswith(("hydra/launcher=", "hydra/sweeper="))]:
        raise UserError(f"{other[0]}: the runs of a sweep are made here, one after the other")
    with _hydra(where) as loader:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


def compose(where: Source, words: Sequence[str], schema: type = RunConfig) -> tuple[DictConfig, list[str]]:
    """Compose rewritten overrides: the config, and what the user should know about it.

    A config that chooses no model, or no task, is a complete file of v1, which knows nothing of our groups, or a
    handful of keys: it is laid over the command's own config.

    Raises:
        UserError: when it cannot be composed.
    """
    with _hydra(where, words) as loader:
        cfg = hydra_compose(where.name, list(words))
        _check_files(loader, where.name, words)
        check_lookups(OmegaConf.to_container(cfg, resolve=False))
    downstream = schema is DownstreamConfig
    complete = chooses_task(cfg) if downstream else _chooses_model(cfg)
    notes = take_places(cfg, complete) if downstream else []
    if where.fallback is None or complete:
        return cfg, notes
    with _hydra(where.fallback):
        base = hydra_compose(where.fallback.name)
    notes.insert(
        0, f"'{where.name}' chooses no {'task' if downstream else 'model'}: it is laid over '{where.fallback.name}'"
    )
    if downstream:
        notes += make_room(base, cfg)
    with open_dict(base):
        base.merge_with(cfg)
    return base, notes


def _check_files(loader: ConfigLoader, name: str, words: Sequence[str]) -> None:
    """See that files of the user, if there are any, set nothing that only the command line may."""
    if CheckedFileSource.files:
        defaults = loader.compute_defaults_list(name, list(words), RunMode.RUN).defaults
        read = [(CheckedFileSource.files.get(default.config_path or ""), default.package) for default in defaults]
        check_permissions([(file, package or file.package or "") for file, package in read if file], words)


def _chooses_model(cfg: DictConfig) -> bool:
    model = cfg.get("model") if "model" in cfg else None
    return "_target_" in cfg or (model is not None and not (isinstance(model, DictConfig) and "_target_" not in model))


def typed(
    where: Source,
    words: Sequence[str],
    schema: type[T] = RunConfig,  # type: ignore[assignment]
) -> tuple[T, list[str]]:
    """Compose and check: the config as `schema`, and what the user should know about it.

    Raises:
        UserError: at any mistake.
    """
    composed, notes = compose(where, words, schema)
    learn(OmegaConf.to_container(composed))
    reader = Reader()
    try:
        cfg = reader.read(composed, schema)
    except RecursionError as error:
        raise UserError(f"cannot compose '{where.name}': references or groups are nested too deeply") from error
    problems = reader.problems if cfg is None else check(cfg)
    if cfg is not None:
        learn(resolved := asdict(cfg))  # type: ignore[call-overload]
        problems += secret_names(resolved)
    if cfg is None or problems:
        more = len(problems) - _SHOWN
        raise UserError("; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else ""))
    without_effect = notice(reader.legacy)
    return cfg, notes + ([without_effect] if without_effect else [])


@contextmanager
def _hydra(where: Source, words: Sequence[str] = ()) -> Iterator[ConfigLoader]:
    """Set Hydra up for a source, and tell its complaints on one line."""
    register(where, words)
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(where.directory), version_base="1.3"):
            warnings.simplefilter("ignore")  # files of v1 leave out `_self_`; Hydra then puts it last, as they mean it
            yield GlobalHydra.instance().config_loader()
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(explain(error, where)) from error
    except RecursionError as error:
        raise UserError(f"cannot compose '{where.name}': references or groups are nested too deeply") from error
    except (AssertionError, TypeError, ValueError) as error:  # Hydra has no class of its own for some complaints
        raise UserError(f"cannot compose '{where.name}': {error}") from error
