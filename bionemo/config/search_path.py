# SPDX-License-Identifier: Apache-2.0
"""What Hydra is told: the directories to search, and the resolvers that YAML may use."""

import os
from functools import reduce
from operator import add, mul
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bionemo.config.paths import CONF_DIR


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


def _number(value: Any) -> Any:
    """Numbers out of the environment arrive as text."""
    if not isinstance(value, str):
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else float(value)


def register(extra: tuple[Path, ...] = ()) -> None:
    """Make the resolvers known, and the search path with the command's own directories; safe to call again."""
    BioNeMoSearchPath.extra = extra
    OmegaConf.register_new_resolver("multiply", lambda *values: reduce(mul, map(_number, values)), replace=True)
    OmegaConf.register_new_resolver("sum", lambda *values: reduce(add, map(_number, values)), replace=True)
    Plugins.instance().register(BioNeMoSearchPath)
