# SPDX-License-Identifier: Apache-2.0
"""Hydra composes, we check: `load` gives a typed config or a one-line UserError."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from bionemo.config.check import check
from bionemo.config.hints import did_you_mean
from bionemo.config.legacy import notice
from bionemo.config.overrides import rewrite
from bionemo.config.paths import default_config_dir, find_config_dir, has_config, options
from bionemo.config.schema import RunConfig
from bionemo.config.search_path import register
from bionemo.config.typed import Reader
from bionemo.errors import UserError

_SHOWN = 3  # mistakes told at once


@dataclass(frozen=True)
class Source:
    """Which config to compose, and from where.

    Attributes:
        name: of the config, without its ending.
        directory: where it is looked for first.
        extra: directories that are searched after it, before our own `conf`.
        fallback: config that a file of v1 is laid over.
    """

    name: str
    directory: Path
    extra: tuple[Path, ...] = ()
    fallback: str | None = None


def source(
    default_name: str,
    config_name: str | None = None,
    config_path: str | Path | None = None,
    config_dir: str | Path | None = None,
    default_dir: str | Path | None = None,
) -> Source:
    """Work out the source from the command's defaults and the user's flags.

    `config_path` takes the place of the default directory; `config_dir` is searched as well, and comes first when it
    has the config that is asked for.
    """
    name = (config_name or default_name).removesuffix(".yaml")
    main = Path(default_dir) if default_dir else default_config_dir(default_name)
    directories = [find_config_dir(config_path)] if config_path else [main]
    if config_dir:
        added = find_config_dir(config_dir)
        directories.insert(0 if has_config(added, name) and not config_path else 1, added)
    extra = tuple(dict.fromkeys([*directories[1:], main]))
    return Source(name, directories[0], extra, default_name)


def load(config_name: str, overrides: Iterable[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """Compose and check a config, for notebooks and tests.

    Args:
        config_name: name of a file in `config_dir`.
        overrides: as on a command line.
        config_dir: directory of the file; our `conf` when None.

    Raises:
        UserError: at any mistake, on one line.
    """
    with composer(source(config_name, default_dir=config_dir)) as composed:
        return composed.typed(composed.words(overrides))[0]


class Composer:
    """Composes one source, inside `composer`."""

    def __init__(self, where: Source) -> None:
        self.source = where

    def words(self, overrides: Iterable[str], sweep: bool = False) -> list[str]:
        """Rewrite a command line for Hydra."""
        repository = GlobalHydra.instance().config_loader()
        return [rewrite(word, repository.get_group_options, sweep) for word in overrides]

    def jobs(self, words: Sequence[str]) -> list[list[str]]:
        """Every combination of a sweep, each as the words of a run.

        Raises:
            UserError: when other means of sweeping are asked for.
        """
        if other := [word for word in words if word.startswith(("hydra/launcher=", "hydra/sweeper="))]:
            raise UserError(f"{other[0]}: the runs of a sweep are made here, one after the other")
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        return BasicSweeper.split_arguments(parser.parse_overrides(list(words)), max_batch_size=None)[0]

    def config(self, words: Sequence[str]) -> DictConfig:
        """Compose rewritten overrides.

        A config without `model._target_` is a complete file of v1: it knows nothing of our groups, so it is laid
        over the command's own config, which has them.
        """
        cfg = _compose(self.source.name, list(words))
        model = cfg._get_node("model")
        if isinstance(model, DictConfig) and "_target_" not in model and self.source.fallback:
            base = _compose(self.source.fallback, [])
            with open_dict(base):
                base.merge_with(cfg)
            return base
        return cfg

    def typed(self, words: Sequence[str]) -> tuple[RunConfig, str | None]:
        """Compose and check: the typed config, and a line about keys of v1 that have no effect.

        Raises:
            UserError: at any mistake.
        """
        reader = Reader()
        cfg = reader.read(self.config(words), RunConfig)
        problems = reader.problems if cfg is None else check(cfg)
        if problems:
            more = len(problems) - _SHOWN
            raise UserError("; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else ""))
        assert cfg is not None
        return cfg, notice(reader.legacy)


def _compose(name: str, words: list[str]) -> DictConfig:
    try:
        return hydra_compose(name, words)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        raise
    except (AssertionError, TypeError, ValueError) as error:  # Hydra has no class of its own for some complaints
        raise UserError(f"cannot compose '{name}': {error}") from error


@contextmanager
def composer(where: Source) -> Iterator[Composer]:
    """Set Hydra up for a source, and tell its complaints on one line.

    Raises:
        UserError: for whatever Hydra, OmegaConf or YAML raise inside.
    """
    register(where.extra)
    try:
        with initialize_config_dir(str(where.directory.resolve()), version_base="1.3", job_name="bionemo"):
            yield Composer(where)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(explain(error, where)) from error


def explain(error: Exception, where: Source) -> str:
    """Say on one line what Hydra said on many."""
    if isinstance(error, MissingConfigException):
        return _missing_config(error, where)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("You must specify"):  # "..., e.g, model=<OPTION>", then the options, one a line
        return f"{lines[0].partition(',')[0]}: one of {', '.join(o for o in lines[2:] if not o.startswith('_'))}"
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines[1:] = str(error.__cause__).splitlines()[:1]
    return " ".join(lines[:3])


def _missing_config(error: MissingConfigException, where: Source) -> str:
    missing = str(error.missing_cfg_file)
    group, _, name = missing.rpartition("/")
    if error.options is None:  # the primary config itself
        known = sorted({name for directory in (where.directory, *where.extra) for name in options(directory)})
        return (
            f"no config '{missing}' in {where.directory}{did_you_mean(missing, known)}: there are {', '.join(known)}"
        )
    known = [option for option in error.options if not option.startswith("_")]
    if not known:
        return f"no config '{missing}': there is no group '{group}'"
    return f"no {group} '{name}'{did_you_mean(name, known)}: there are {', '.join(known)}"
