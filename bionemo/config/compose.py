# SPDX-License-Identifier: Apache-2.0
"""Compose a configuration with Hydra and return it as checked dataclasses, or raise a one-line UserError."""

import io
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text, register_secrets
from bionemo.config.check import check_config
from bionemo.config.hints import did_you_mean
from bionemo.config.hydra_setup import configure_hydra
from bionemo.config.origins import describe_values, find_origins
from bionemo.config.overrides import rewrite_override
from bionemo.config.paths import CONF_DIR, EXAMPLES, ConfigSource, find_source, list_configs
from bionemo.config.schema import DownstreamConfig, RunConfig
from bionemo.config.schema_reader import SchemaReader
from bionemo.config.text_values import text_kept
from bionemo.config.v1_keys import describe_ignored_keys, merge_v1_defaults, migrate_keys, selects_task

T = TypeVar("T")
_MAX_REPORTED = 3  # problems in one error message


class MissingValueError(UserError):
    """Raised when missing values are the only problem."""


def load(
    config_name: str,
    overrides: Iterable[str] = (),
    config_dir: str | Path | None = None,
    schema: type[T] = RunConfig,  # type: ignore[assignment]
) -> T:
    """Compose and check a configuration, for notebooks and tests.

    Args:
        config_name: name of a file in `config_dir`.
        overrides: `key=value` or `group=choice`, as on a command line.
        config_dir: directory of the file. By default the package and its examples are searched.
        schema: dataclass of the configuration.

    Raises:
        UserError: if the configuration is invalid.
    """
    source = find_source(config_name, config_dir)
    return compose_typed(source, rewrite_overrides(source, overrides), schema)[0]


def rewrite_overrides(source: ConfigSource, overrides: Iterable[str], sweep: bool = False) -> list[str]:
    """Convert overrides of a command line to Hydra's syntax.

    Raises:
        UserError: if one is not an override.
    """
    with _hydra(source) as loader:
        return [rewrite_override(override, loader.get_group_options, sweep) for override in overrides]


def expand_sweep(source: ConfigSource, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep.

    Raises:
        UserError: if another launcher or sweeper of Hydra is selected.
    """
    if other := [override for override in overrides if override.startswith(("hydra/launcher=", "hydra/sweeper="))]:
        raise UserError(f"{other[0]}: not supported, the runs of a sweep run one after the other in this process")
    with _hydra(source) as loader:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


def compose(source: ConfigSource, overrides: Sequence[str], schema: type = RunConfig) -> tuple[DictConfig, list[str]]:
    """Compose rewritten overrides; return the untyped configuration and notes for the user.

    A configuration that selects no model (for a downstream command: no task) is a complete file of v1, which does not
    use our groups, or a small file with a few keys. It is merged over the command's default configuration.

    Raises:
        UserError: if Hydra cannot compose it.
    """
    with _hydra(source):
        cfg = hydra_compose(source.name, list(overrides))
    downstream = schema is DownstreamConfig
    complete = selects_task(cfg) if downstream else _selects_model(cfg)
    notes = migrate_keys(cfg, complete) if downstream else []
    if source.fallback is None or complete:
        return cfg, notes
    with _hydra(source.fallback):
        base = hydra_compose(source.fallback.name)
    selected = "task" if downstream else "model"
    if not any(source.directory.is_relative_to(packaged) for packaged in (CONF_DIR, EXAMPLES)):
        notes.insert(0, f"'{source.name}' selects no {selected}: it is merged over '{source.fallback.name}'")
    if downstream:
        notes += merge_v1_defaults(base, cfg)
    with open_dict(base):
        base.merge_with(cfg)
    return base, notes


def compose_typed(
    source: ConfigSource,
    overrides: Sequence[str],
    schema: type[T] = RunConfig,  # type: ignore[assignment]
) -> tuple[T, list[str]]:
    """Compose and check; return the configuration as `schema` and notes for the user.

    Raises:
        MissingValueError: if the configuration lacks values.
        UserError: if it is invalid.
    """
    composed, notes = compose(source, overrides, schema)
    register_secrets(OmegaConf.to_container(composed))
    reader = SchemaReader()
    cfg = reader.read(composed, schema)
    problems = reader.problems if cfg is None else check_config(cfg)
    if cfg is not None:
        register_secrets(asdict(cfg))  # type: ignore[call-overload]
        problems += _check_directory(cfg, overrides)
    if cfg is None or problems:
        more = len(problems) - _MAX_REPORTED
        error_class = MissingValueError if len(reader.missing) == len(problems) else UserError
        raise error_class("; ".join(problems[:_MAX_REPORTED]) + (f"; and {more} more" if more > 0 else ""))
    return cfg, notes + describe_ignored_keys(reader.ignored)


def print_origins(source: ConfigSource, overrides: Sequence[str], schema: type, package: str, resolve: bool) -> None:
    """Print each value of a configuration, or of a part, with the file and line that set it; secrets are redacted."""
    cfg, _ = compose(source, overrides, schema)
    origins: dict[str, str] = {}
    for each, words in ((source.fallback, []), (source, overrides)):
        if each is not None:
            with _hydra(each) as loader:
                origins |= find_origins(loader, each.name, words)
    print(redact_text("\n".join(describe_values(cfg, origins, package, resolve))))


def print_by_hydra(source: ConfigSource, overrides: Sequence[str], flags: Namespace) -> None:
    """Run Hydra for its own flags (--cfg, --info, --hydra-help, -sc), and print its output with secrets redacted."""
    output = io.StringIO()
    with _hydra(source), redirect_stdout(output):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        if flags.hydra_help:
            hydra.hydra_help(source.name, get_args_parser(), flags)
        elif flags.shell_completion:
            hydra.shell_completion(source.name, list(overrides))
        elif flags.cfg:
            hydra.show_cfg(source.name, list(overrides), flags.cfg, flags.package, flags.resolve)
        else:
            hydra.show_info(flags.info, source.name, list(overrides))
    print(redact_text(output.getvalue()), end="")


def _check_directory(cfg: object, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem if the file sets explicit_log_dir, so that exp_dir on the command line would be ignored."""
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not isinstance(cfg, RunConfig | DownstreamConfig) or "exp_manager.exp_dir" not in keys:
        return
    exp_dir, log_dir = cfg.exp_manager.exp_dir, cfg.exp_manager.explicit_log_dir
    if "exp_manager.explicit_log_dir" in keys or not exp_dir or not log_dir:
        return
    if not Path(log_dir).absolute().is_relative_to(Path(exp_dir).absolute()):
        yield (
            f"exp_manager.exp_dir={exp_dir} has no effect, because the file sets "
            f"exp_manager.explicit_log_dir={log_dir}: set this key, too"
        )


def _selects_model(cfg: DictConfig) -> bool:
    model = cfg.get("model") if "model" in cfg else None
    return "_target_" in cfg or (model is not None and not (isinstance(model, DictConfig) and "_target_" not in model))


@contextmanager
def _hydra(source: ConfigSource) -> Iterator[ConfigLoader]:
    """Initialize Hydra for a source and convert its errors to one-line UserErrors."""
    configure_hydra(source)
    try:
        with (
            text_kept(),
            warnings.catch_warnings(),
            initialize_config_dir(str(source.directory), version_base="1.3"),
        ):
            warnings.simplefilter("ignore")  # v1's files omit `_self_`; Hydra then puts it last, as they expect
            yield GlobalHydra.instance().config_loader()
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(_describe_error(error, source)) from error
    except (AssertionError, RecursionError, TypeError, ValueError) as error:  # Hydra raises these for some mistakes
        raise UserError(f"cannot compose '{source.name}': {error}") from error


def _describe_error(error: Exception, source: ConfigSource) -> str:
    """Return a one-line message for an error of Hydra, OmegaConf or the YAML parser."""
    if isinstance(error, MissingConfigException):
        return _describe_missing_config(error, source)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("You must specify"):  # "..., e.g, model=<OPTION>", then one option per line
        return f"{lines[0].partition(',')[0]}: one of {', '.join(o for o in lines[2:] if not o.startswith('_'))}"
    if lines[0].startswith("Multiple values for"):  # a group that already has a value was given with a +
        return f"{lines[0].split()[3].rstrip('.')} has a value already: remove the + to replace it"
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines[1:] = str(error.__cause__).splitlines()[:1]
    return " ".join(lines[:3])


def _describe_missing_config(error: MissingConfigException, source: ConfigSource) -> str:
    missing = str(error.missing_cfg_file).removesuffix(".yaml")
    group, _, name = missing.rpartition("/")
    if not group:
        known = sorted({name for directory in (source.directory, *source.extra) for name in list_configs(directory)})
        context = f"in {source.directory}" if missing == source.name else f"for the defaults of '{source.name}'"
        return (
            f"no config '{missing}' {context}{did_you_mean(missing, known)}: available: {', '.join(known) or 'none'}"
        )
    known = [option for option in error.options or () if not option.startswith("_")]
    if not known:
        return f"no config '{missing}': the group '{group}' does not exist"
    return f"no {group} '{name}'{did_you_mean(name, known)}: available: {', '.join(known)}"
