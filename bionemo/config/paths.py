# SPDX-License-Identifier: Apache-2.0
"""Locations of configuration files."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel contains conf/ inside the package. In a checkout or an editable install it is beside the package.
CONF_DIR = next((path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir()), _PACKAGE / "conf")
CHECKOUT = CONF_DIR.parent  # of a wheel: the installed package, which contains the examples, too
EXAMPLES = CHECKOUT / "examples"


@dataclass(frozen=True)
class ConfigSource:
    """A configuration file and the directories to search."""

    name: str  # file name without .yaml
    directory: Path  # the first directory to search
    extra: tuple[Path, ...] = ()  # directories to search next, before `conf/` of the package
    # configuration over which a file without a model is merged; None if it is this source
    fallback: "ConfigSource | None" = None


def find_source(
    default_name: str,
    default_dir: str | Path | None = None,
    config_name: str | None = None,
    config_path: str | Path | None = None,
    config_dir: str | Path | None = None,
) -> ConfigSource:
    """Combine a command's defaults with the user's flags.

    `config_path` replaces the default directory. `config_dir` is searched in addition, and first if it contains the
    requested file.

    Raises:
        UserError: if a directory does not exist.
    """
    name = (config_name or default_name).removesuffix(".yaml")
    home = Path(default_dir).resolve() if default_dir else default_config_dir(default_name)
    added = find_config_dir(config_dir) if config_dir else None
    in_added = added is not None and has_config(added, name) and not config_path
    if config_path:
        first = find_config_dir(config_path)
    else:
        first = home if default_dir or in_added or has_config(home, name) else default_config_dir(name)
    directories = [first]
    if added is not None:
        directories.insert(0 if in_added else 1, added)
    extra = tuple(path for path in dict.fromkeys([*directories, home]) if path != directories[0])
    is_default = (name, directories[0]) == (default_name, home)
    return ConfigSource(name, directories[0], extra, None if is_default else ConfigSource(default_name, home))


def default_config_dir(name: str) -> Path:
    """Return the directory of a configuration: `conf` beside the running script, the package's, or an example's.

    If several examples have this configuration, the one whose name is the prefix of `name` is chosen.

    Raises:
        UserError: if several examples have a configuration of this name.
    """
    beside = script_dir() / "conf"
    default = beside if beside.is_dir() else CONF_DIR
    if first := next((path for path in (beside, CONF_DIR) if has_config(path, name)), None):
        return first
    found = [path for path in sorted(EXAMPLES.glob("**/conf")) if has_config(path, name)]
    found = [path for path in found if name.startswith(f"{path.parent.name}_")] or found
    if len(found) > 1:
        examples = ", ".join(path.parent.name for path in found)
        raise UserError(f"config '{name}' exists in {examples}: choose one, for example --config-path={found[0]}")
    return found[0] if found else default


def find_config_dir(directory: str | Path) -> Path:
    """Return the absolute path of a directory from the command line.

    Raises:
        UserError: if it exists neither beside the running script nor in the working directory, or it is not readable.
            Hydra would silently use a file of the same name from another directory.
    """
    given = Path(directory).expanduser()
    for base in (script_dir(), Path.cwd()):
        if (found := base / given).is_dir():  # an absolute path ignores the base
            if not os.access(found, os.R_OK | os.X_OK):
                raise UserError(f"config directory '{directory}' cannot be read: check the permissions and the owner")
            return found.resolve()
    raise UserError(f"config directory '{directory}' not found in {script_dir()} or {Path.cwd()}")


def script_dir() -> Path:
    """Return the directory of the running script."""
    return Path(sys.argv[0] or ".").resolve().parent


def has_config(directory: Path, name: str) -> bool:
    """Return whether the directory contains a configuration of this name."""
    return (directory / f"{name}.yaml").is_file()


def list_configs(directory: Path) -> list[str]:
    """Return the names of the configurations in a directory, without those that start with `_` (parts of others)."""
    return sorted(path.stem for path in directory.glob("*.yaml") if not path.name.startswith("_"))
