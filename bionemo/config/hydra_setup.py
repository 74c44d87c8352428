# SPDX-License-Identifier: Apache-2.0
"""Configure Hydra: checks of the user's files, the search path, and the resolvers `multiply` and `sum`."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from importlib.machinery import PathFinder
from operator import add, mul
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.config_source import ConfigSource as HydraSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import ListConfig, OmegaConf

from bionemo.common.errors import UserError
from bionemo.config.interpolations import check_interpolations
from bionemo.config.paths import CONF_DIR, ConfigSource
from bionemo.config.text_values import keep_text_of_overrides, read_yaml
from bionemo.config.untrusted_files import TRUST_FLAG, UserFile, check_yaml_limits, is_packaged

_SEARCH_PATH = re.compile(r"\+{0,2}hydra\.searchpath=")
_MAX_NUMBER = 1e18  # operands and results of resolvers
_HEADER = 512  # characters of a file that may contain `# @package`, as in Hydra
_MAX_DIGITS = 40  # of a number in text


def configure_hydra(source: ConfigSource, overrides: Iterable[str] = ()) -> None:
    """Register resolvers, search path and file checks for the next composition. May be called repeatedly."""
    if not os.environ.get("BIONEMO_HOME", "unset"):  # an empty variable is not a directory: files would be in /
        del os.environ["BIONEMO_HOME"]
    register_resolvers()
    keep_text_of_overrides()
    _exclude_working_directory_plugins()
    BioNeMoSearchPath.extra = source.extra
    Plugins.instance().register(BioNeMoSearchPath)  # creating the instance registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = CheckedFileSource
    CheckedFileSource.trusted = source.trusted
    CheckedFileSource.search_path_overridden = any(_SEARCH_PATH.match(override) for override in overrides)
    CheckedFileSource.files.clear()


def register_resolvers() -> None:
    """Register `${multiply:...}` and `${sum:...}`."""
    for name, operation in (("multiply", mul), ("sum", add)):
        OmegaConf.register_new_resolver(name, _resolver(name, operation), replace=True)


def _exclude_working_directory_plugins() -> None:
    """Import the package `hydra_plugins` without the working directory, which `python -m` searches first."""
    if "hydra_plugins" in sys.modules:
        return
    here = os.path.realpath(os.getcwd())
    spec = PathFinder.find_spec("hydra_plugins", [path for path in sys.path if os.path.realpath(path or ".") != here])
    package = ModuleType("hydra_plugins")
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    sys.modules["hydra_plugins"] = package


class CheckedFileSource(FileConfigSource):
    """Reads YAML files; checks and records those of the user."""

    trusted: ClassVar[bool] = False  # whether the user's files are not checked (`--trust-config`)
    # whether the command line sets `hydra.searchpath`, which replaces that of files
    search_path_overridden: ClassVar[bool] = False
    # the user's files read since `configure_hydra`, by Hydra's name of the file
    files: ClassVar[dict[str, UserFile]] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; see Hydra's ConfigSource.

        Raises:
            UserError: if a file of the user is too large or contains something that is not permitted.
        """
        path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if not path.exists():
            return super().load_config(config_path)
        packaged = is_packaged(path)
        if not packaged:
            check_yaml_limits(path)
        with path.open(encoding="utf-8") as file:
            header = HydraSource._get_header_dict(file.read(_HEADER))
        result = ConfigResult(self.provider, f"{self.scheme()}://{self.path}", read_yaml(path), header)
        if not packaged and not self.trusted:
            content = OmegaConf.to_container(result.config, resolve=False)
            check_interpolations(content, str(path))
            self._check_search_path(path, result)
            self.files[config_path] = UserFile(path, content, result.header.get("package"))
        return result

    def _check_search_path(self, path: Path, result: ConfigResult) -> None:
        if self.search_path_overridden or not OmegaConf.is_dict(result.config):
            return
        entries = OmegaConf.select(result.config, "hydra.searchpath")
        for entry in entries if isinstance(entries, ListConfig) else ():
            scheme, separator, _ = str(entry).partition("://")
            if separator and scheme != "file":
                raise UserError(
                    f"{path} sets hydra.searchpath to {str(entry)[:80]!r}, which imports code: a file may name only "
                    f"directories; to allow it, add hydra.searchpath=[...] to the command line, or {TRUST_FLAG}"
                )


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
    """Return a resolver that combines numbers by an operation.

    It raises ValueError for anything else, and if the result is too large or not finite.
    """

    def calculate(*values: Any) -> int | float:
        result: int | float = reduce(operation, [_to_number(name, value) for value in values])
        if not abs(result) <= _MAX_NUMBER:
            raise ValueError(f"{name} gives {result:g}, expected at most {_MAX_NUMBER:g}")
        return result

    return calculate


def _to_number(name: str, value: Any) -> int | float:
    """Convert an operand to a number; numbers from environment variables are text."""
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        with suppress(ValueError):
            value = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise ValueError(f"{name} takes numbers up to {_MAX_NUMBER:g}, not {str(value)[:40]!r}")
    return value
