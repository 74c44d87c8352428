# SPDX-License-Identifier: Apache-2.0
"""What Hydra is told: the directories to search, and the resolvers that YAML may use."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from operator import add, mul
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bionemo.config.file_source import CheckedFileSource, use_checked_files
from bionemo.config.paths import CONF_DIR, Source

_SEARCH_PATH = re.compile(r"\+{0,2}hydra\.searchpath=")
_LARGEST = 1e18  # of a number that is calculated, and of the result
_DIGITS = 40  # of a number in the environment


class BioNeMoSearchPath(SearchPathPlugin):
    """Lets a file in any directory name the groups of `conf/`, and directories named in the environment."""

    extra: tuple[Path, ...] = ()  # the command's own directories, between the user's and ours

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the user's directories first or last, ours behind the command's."""
        for path in _from_environment("BIONEMO_PREPEND_SEARCH_PATH"):
            search_path.prepend(provider="BIONEMO_PREPEND_SEARCH_PATH", path=path)
        for directory in (*type(self).extra, CONF_DIR):
            search_path.append(provider="bionemo", path=f"file://{directory}")
        for path in _from_environment("BIONEMO_APPEND_SEARCH_PATH"):
            search_path.append(provider="BIONEMO_APPEND_SEARCH_PATH", path=path)


def _from_environment(name: str) -> list[str]:
    return [path.strip() for path in os.environ.get(name, "").split(",") if path.strip()]


def register(where: Source, words: Iterable[str] = ()) -> None:
    """Make the resolvers, the search path and the checks of files known to Hydra; safe to call again.

    Args:
        where: the config that is composed next.
        words: of the command line.
    """
    BioNeMoSearchPath.extra = where.extra
    OmegaConf.register_new_resolver("multiply", lambda *values: _calculate("multiply", mul, values), replace=True)
    OmegaConf.register_new_resolver("sum", lambda *values: _calculate("sum", add, values), replace=True)
    use_checked_files()
    CheckedFileSource.begin(where.trusted, any(_SEARCH_PATH.match(word) for word in words))
    Plugins.instance().register(BioNeMoSearchPath)


def _calculate(name: str, operation: Callable[[Any, Any], Any], values: Iterable[Any]) -> int | float:
    """Multiply or add numbers.

    Raises:
        ValueError: for anything else, and when the result is not finite or too large.
    """
    result = reduce(operation, [_number(name, value) for value in values])
    if not abs(result) <= _LARGEST:
        raise ValueError(f"{name} gives {result:g}, expected at most {_LARGEST:g}")
    return result


def _number(name: str, value: Any) -> int | float:
    """Read a number; those of the environment arrive as text."""
    if isinstance(value, str) and len(value) <= _DIGITS:
        with suppress(ValueError):
            value = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError(f"{name} takes numbers up to {_LARGEST:g}, not {str(value)[:40]!r}")
    return value
