# SPDX-License-Identifier: Apache-2.0
"""Configure Hydra: the search path, and the resolvers `multiply` and `sum`."""

import os
from collections.abc import Callable
from functools import reduce
from operator import add, mul
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bionemo.config.paths import CONF_DIR, ConfigSource
from bionemo.config.schema_reader import parse_text


def configure_hydra(source: ConfigSource) -> None:
    """Register resolvers and search path for the next composition. May be called repeatedly."""
    if not os.environ.get("BIONEMO_HOME", "unset"):  # an empty variable is not a directory: files would be in /
        del os.environ["BIONEMO_HOME"]
    register_resolvers()
    BioNeMoSearchPath.extra = source.extra
    Plugins.instance().register(BioNeMoSearchPath)  # creating the instance registers Hydra's own sources


def register_resolvers() -> None:
    """Register `${multiply:...}` and `${sum:...}`."""
    for name, operation in (("multiply", mul), ("sum", add)):
        OmegaConf.register_new_resolver(name, _resolver(name, operation), replace=True)


class BioNeMoSearchPath(SearchPathPlugin):
    """Lets a file in any directory use the groups of `conf/` and of directories named in the environment."""

    extra: tuple[Path, ...] = ()  # directories of the command, searched after the user's and before `conf/`

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directories; see Hydra's SearchPathPlugin."""
        for path in _directories("BIONEMO_PREPEND_SEARCH_PATH"):
            search_path.prepend(provider="BIONEMO_PREPEND_SEARCH_PATH", path=path)
        for directory in (*type(self).extra, CONF_DIR):
            search_path.append(provider="bionemo", path=f"file://{directory}")
        for path in _directories("BIONEMO_APPEND_SEARCH_PATH"):
            search_path.append(provider="BIONEMO_APPEND_SEARCH_PATH", path=path)


def _directories(variable: str) -> list[str]:
    return [path.strip() for path in os.environ.get(variable, "").split(",") if path.strip()]


def _resolver(name: str, operation: Callable[[Any, Any], Any]) -> Callable[..., int | float]:
    """Return a resolver that combines numbers by an operation; it raises ValueError for anything else."""
    return lambda *values: reduce(operation, [_to_number(name, value) for value in values])


def _to_number(name: str, value: Any) -> int | float:
    """Convert an operand to a number; numbers from environment variables are text."""
    number = parse_text(value, (int, float)) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{name} takes numbers, not {value!r}")
    return number
