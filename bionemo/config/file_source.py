# SPDX-License-Identifier: Apache-2.0
"""How Hydra reads files: those of the user are checked before anything in them counts."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import ListConfig, OmegaConf

from bionemo.common.errors import UserError
from bionemo.config.permissions import TRUST, UserFile, is_packaged
from bionemo.config.references import check_references
from bionemo.config.yaml_bounds import check_bounds


class CheckedFileSource(FileConfigSource):
    """Reads a YAML file of the user only within limits, and keeps what it says.

    Attributes:
        trusted: whether the user has allowed files everything.
        search_path_typed: whether the command line gives `hydra.searchpath`, which replaces that of files.
        files: what has been read since `begin`, by Hydra's name of the file.
    """

    trusted: ClassVar[bool] = False
    search_path_typed: ClassVar[bool] = False
    files: ClassVar[dict[str, UserFile]] = {}

    @classmethod
    def begin(cls, trusted: bool, search_path_typed: bool = False) -> None:
        """Forget what was read before."""
        cls.trusted, cls.search_path_typed = trusted, search_path_typed
        cls.files.clear()

    def load_config(self, config_path: str) -> ConfigResult:
        """See Hydra.

        Raises:
            UserError: when a file of the user is too large, or says what a file may not.
        """
        path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if is_packaged(path) or not path.exists():
            return super().load_config(config_path)
        check_bounds(path)
        try:
            result = super().load_config(config_path)
        except OSError as error:
            if error.errno is None:  # OmegaConf's own, for a scalar
                raise UserError(
                    f"{path} holds no keys: a configuration file is a mapping of keys to values"
                ) from error
            raise
        if not self.trusted:
            content = OmegaConf.to_container(result.config, resolve=False)
            check_references(content, str(path))
            self._check_search_path(path, result)
            self.files[config_path] = UserFile(path, content, result.header.get("package"))
        return result

    def _check_search_path(self, path: Path, result: ConfigResult) -> None:
        if self.search_path_typed or not OmegaConf.is_dict(result.config):
            return
        entries = OmegaConf.select(result.config, "hydra.searchpath")
        for entry in entries if isinstance(entries, ListConfig) else ():
            scheme, separator, _ = str(entry).partition("://")
            if separator and scheme != "file":
                raise UserError(
                    f"{path} sets hydra.searchpath to {str(entry)[:80]!r}, which imports code: a file may name "
                    f"directories alone; if you want that, type hydra.searchpath=[...] on the command line, or {TRUST}"
                )


def use_checked_files() -> None:
    """Let Hydra read files as this module does, and import no plugin from the working directory."""
    _find_installed_plugins()
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = CheckedFileSource


def _find_installed_plugins() -> None:
    """Give Hydra the package of its plugins without the working directory, which `python -m` searches first."""
    if "hydra_plugins" in sys.modules:
        return
    here = os.path.realpath(os.getcwd())
    spec = PathFinder.find_spec("hydra_plugins", [path for path in sys.path if os.path.realpath(path or ".") != here])
    package = ModuleType("hydra_plugins")
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    sys.modules["hydra_plugins"] = package
