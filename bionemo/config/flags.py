# SPDX-License-Identifier: Apache-2.0
"""The flags of every command: where the config is, and Hydra's own."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from bionemo.common.errors import UserError

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see --help")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read a command line: flags by name, `overrides` as a list.

    Raises:
        UserError: for a flag that does not exist.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--trust-config", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    flags = parser.parse_intermixed_args(words)
    if (flags.resolve or flags.package) and not flags.cfg:
        parser.error("--resolve and --package go with --cfg job")
    return flags


def hydra_words(flags: argparse.Namespace) -> list[str]:
    """The flags that Hydra itself answers; none in a run."""
    words = [f"--{name}" for name in ("hydra-help", "shell-completion") if getattr(flags, name.replace("-", "_"))]
    for name in ("cfg", "package", "info"):
        words += [f"--{name}", getattr(flags, name)] if getattr(flags, name) else []
    return [*words, "--resolve"] if flags.resolve else words


def source_words(flags: argparse.Namespace) -> list[str]:
    """The flags that say where the config is."""
    given = {name: getattr(flags, name.replace("-", "_")) for name in ("config-name", "config-path", "config-dir")}
    words = [f"--{name}={value}" for name, value in given.items() if value]
    return [*words, "--trust-config"] if flags.trust_config else words
