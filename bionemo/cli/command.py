# SPDX-License-Identifier: Apache-2.0
"""Entry point of every command: parse the flags, compose and check the configuration, run the task.

Hydra composes the configuration and handles its own flags (--cfg, --info). Its output directory, its logging and its
change of directory are not used. sys.argv is left unchanged, because Lightning starts the same command line for other
devices.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bionemo.cli.help import PRETRAINING, CommandSpec, help_text
from bionemo.common.console import notify, one_line_errors
from bionemo.common.errors import UserError
from bionemo.config.model_argument import split_model
from bionemo.config.paths import CONF_DIR, ConfigSource, find_source

_LOCATION_FLAGS = ("config-name", "config-path", "config-dir")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def run(
    task: Callable[[Any], Any],
    config_name: str,
    config_dir: str | Path | None = None,
    spec: CommandSpec = PRETRAINING,
    complete: Callable[[ConfigSource, Sequence[str], bool, bool], tuple[ConfigSource, list[str]]] | None = None,
) -> None:
    """Compose and check the configuration given by sys.argv, then pass it to the task.

    Args:
        task: function that receives the typed configuration; it may return metrics for the table of a sweep.
        config_name: default of `--config-name`.
        config_dir: directory of that file. By default `conf` beside the running script, else the package's own.
        spec: schema and `--help` text of the command.
        complete: replaces the source and the overrides; its last arguments tell whether the user named the source, and
            whether this is a sweep.
    """
    with one_line_errors() as interrupted:
        flags = parse_flags(sys.argv[1:])
        if flags.help:
            source = find_source(config_name, config_dir, flags.config_name, flags.config_path, flags.config_dir)
            print(help_text(_program(), config_name, source.directory, CONF_DIR, spec), end="")
        elif flags.version:
            from bionemo.common.version import __version__

            print(f"bionemo {__version__}")
        else:
            flags.overrides = _name_model(flags.overrides, spec)
            source = find_source(config_name, config_dir, flags.config_name, flags.config_path, flags.config_dir)
            if complete:
                named = bool(flags.config_name or config_dir)
                source, flags.overrides = complete(source, flags.overrides, named, flags.multirun)
            if flags.trust_config:
                notify("--trust-config has no effect: configuration files may set every key")
            _run(task, flags, source, spec, interrupted)


def _name_model(words: Sequence[str], spec: CommandSpec) -> list[str]:
    """Replace the MODEL of a command line by the configuration key of the command."""
    if not spec.model_key:
        return [*words]
    model, overrides = split_model(words, spec.has_groups)
    if model is None:
        return overrides
    if any(each.lstrip("+").partition("=")[0] == spec.model_key for each in overrides):
        raise UserError(f"MODEL {model!r} is given, and {spec.model_key}: omit one")
    return [f"{spec.model_key}={model}", *overrides]


def _run(
    task: Callable[[Any], Any],
    flags: argparse.Namespace,
    source: ConfigSource,
    spec: CommandSpec,
    interrupted: list[int],
) -> None:
    # --help and wrong flags must not wait for the import of Hydra
    from bionemo.cli.sweep import Job, check_jobs, run_jobs
    from bionemo.config.compose import (
        MissingValueError,
        compose_typed,
        expand_sweep,
        print_by_hydra,
        print_origins,
        rewrite_overrides,
    )

    if flags.shell_completion or flags.hydra_help:
        print_by_hydra(source, flags.overrides, flags)
        return
    query = flags.cfg or flags.info
    overrides = rewrite_overrides(source, flags.overrides, sweep=flags.multirun)
    jobs: list[Job] = []
    try:
        if flags.multirun:  # check all jobs before the first one runs
            jobs = check_jobs(source, expand_sweep(source, overrides), spec.schema)
        else:
            jobs = [Job(overrides, *compose_typed(source, overrides, spec.schema))]
    except MissingValueError as error:
        if not query:  # a configuration can be printed without them
            wanted = f"give {spec.model_key}="
            raise UserError(str(error).replace(wanted, wanted.replace("give", "give MODEL, or"))) from error
    if flags.origin:
        print_origins(source, overrides, spec.schema, flags.package or "", flags.resolve)
    elif query:
        print_by_hydra(source, overrides, flags)
    elif flags.multirun:
        run_jobs(task, jobs, _location_arguments(flags), interrupted)
    else:
        [job] = jobs
        notify(*job.notes)
        task(job.config)


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises a `UserError` for a wrong argument."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise UserError(f"{message}: see --help")


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line into flags and `overrides`.

    Raises:
        UserError: if a flag does not exist.
    """
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in (["--config-name", "-cn"], ["--config-path", "-cp"], ["--config-dir", "-cd"], ["--package", "-p"]):
        parser.add_argument(*names)
    for names in (["--help", "-h"], ["--multirun", "-m"], ["--shell-completion", "-sc"]):
        parser.add_argument(*names, action="store_true")
    for name in ("--trust-config", "--hydra-help", "--version", "--resolve", "--origin"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    flags = parser.parse_intermixed_args(arguments)
    if (flags.resolve or flags.package or flags.origin) and not flags.cfg:
        parser.error("--resolve, --origin and --package need --cfg job")
    if flags.origin and flags.cfg != "job":
        parser.error("--origin needs --cfg job")
    return flags


def _location_arguments(flags: argparse.Namespace) -> list[str]:
    values = {name: getattr(flags, name.replace("-", "_")) for name in _LOCATION_FLAGS}
    return [f"--{name}={value}" for name, value in values.items() if value]


def _program() -> str:
    """Return the command that starts this program, for `--help`."""
    if sys.argv[0].startswith("bionemo "):  # set by cli/main.py
        return sys.argv[0]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        return f"python -m {module.name.removesuffix('.__main__')}"
    script = sys.argv[0]
    return f"python {os.path.relpath(script)}" if script.endswith(".py") else os.path.basename(script)
