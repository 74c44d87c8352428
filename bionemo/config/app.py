# SPDX-License-Identifier: Apache-2.0
"""The entry of every command: flags, composition, check, and one line for every mistake.

A run composes through Hydra and keeps nothing else of it: no output directory, no logging, no change of directory. The
command line stays as it was typed, since Lightning starts it again for more devices.
"""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bionemo.common.console import one_line_errors, tell
from bionemo.common.redaction import redact_arguments, redact_text
from bionemo.config.flags import hydra_words, parse, source_words
from bionemo.config.help import TRAINING, Topic, help_text
from bionemo.config.paths import CONF_DIR, Source, source

if TYPE_CHECKING:  # Hydra is imported late: --help and a wrong flag need none of it
    from omegaconf import DictConfig


def run(
    task: Callable[[Any], None], config_name: str, config_dir: str | Path | None = None, topic: Topic = TRAINING
) -> None:
    """Compose and check the config that the command line asks for, then hand it to the task.

    Args:
        task: the command's work.
        config_name: the config when no `--config-name` is given.
        config_dir: where it is; by default `conf` beside the running script, else the package's own.
        topic: what the command is about: the dataclass of its config, and what `--help` says.
    """
    with one_line_errors():
        flags = parse(sys.argv[1:])
        if flags.help:
            _print_help(flags, config_name, config_dir, topic)
        elif flags.version:
            print(_version())
        else:
            _dispatch(task, flags, config_name, config_dir, topic)


def _dispatch(
    task: Callable[[Any], None], flags: Namespace, default_name: str, config_dir: str | Path | None, topic: Topic
) -> None:
    from bionemo.config.compose import rewritten, sweep_jobs, typed

    where = source(
        default_name, config_dir, flags.config_name, flags.config_path, flags.config_dir, flags.trust_config
    )
    if flags.shell_completion or flags.hydra_help:
        _ask_hydra(where, [*hydra_words(flags), *flags.overrides])
        return
    words = rewritten(where, flags.overrides, sweep=flags.multirun)
    jobs = sweep_jobs(where, words) if flags.multirun else [words]
    checked: list[tuple[Any, list[str]]] = [
        typed(where, job, topic.schema) for job in jobs
    ]  # all of them, before the first is run
    if questions := hydra_words(flags):
        _ask_hydra(where, [*questions, *words])
    elif flags.multirun:
        for number, (job, (cfg, notes)) in enumerate(zip(jobs, checked, strict=True), 1):
            tell(f"run {number} of {len(jobs)}: {' '.join(redact_arguments(job))}", *notes)
            with _command_line([*source_words(flags), *job]):
                task(cfg)
    else:
        [(cfg, notes)] = checked
        tell(*notes)
        task(cfg)


def _ask_hydra(where: Source, words: Sequence[str]) -> None:
    """Let Hydra print what it is asked for; secrets are hidden, as in everything that is printed."""
    import hydra

    from bionemo.config.search_path import register

    register(where, words)
    with _command_line(words), _redacted_output():
        hydra.main(version_base="1.3", config_path=str(where.directory), config_name=where.name)(_never)()


def _never(cfg: "DictConfig") -> None:
    raise AssertionError("Hydra was asked a question, not for a run")


@contextmanager
def _redacted_output() -> Iterator[None]:
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        print(redact_text(printed.getvalue()), end="")


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


def _print_help(flags: Namespace, config_name: str, config_dir: str | Path | None, topic: Topic) -> None:
    where = source(config_name, config_dir, flags.config_name, flags.config_path, flags.config_dir)
    print(help_text(_command(), config_name, where.directory, CONF_DIR, topic), end="")


def _command() -> str:
    """What to type to get here again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        return f"python -m {module.name}"
    script = sys.argv[0]
    return f"python {os.path.relpath(script)}" if script.endswith(".py") else os.path.basename(script)


def _version() -> str:
    from bionemo.common.version import __version__

    return f"bionemo {__version__}"
