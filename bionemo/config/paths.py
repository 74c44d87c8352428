# SPDX-License-Identifier: Apache-2.0
"""Where configuration files are found."""

import sys
from pathlib import Path

from bionemo.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries conf/ inside the package; a checkout and an editable install have it beside the package.
CONF_DIR = next((path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir()), _PACKAGE / "conf")


def find_config_dir(directory: str | Path) -> Path:
    """Give the absolute path of a directory named on the command line.

    Raises:
        UserError: when there is no such directory beside the running script or under the working directory.
    """
    given = Path(directory).expanduser()
    for base in (script_dir(), Path.cwd()):
        if (base / given).is_dir():  # an absolute path ignores the base
            return (base / given).resolve()
    raise UserError(f"config directory '{directory}' not found, neither beside {script_dir()} nor in {Path.cwd()}")


def default_config_dir(config_name: str) -> Path:
    """`conf` beside the running script when it has that config, else ours."""
    beside = script_dir() / "conf"
    return beside if has_config(beside, config_name) else CONF_DIR


def script_dir() -> Path:
    """Directory of the running script."""
    return Path(sys.argv[0] or ".").resolve().parent


def has_config(directory: Path, name: str) -> bool:
    """Whether the directory holds a config of this name, given with or without its ending."""
    return (directory / f"{name.removesuffix('.yaml')}.yaml").is_file()


def options(directory: Path) -> list[str]:
    """Names of the configs in a directory; a name that starts with `_` is a part of others."""
    return sorted(path.stem for path in directory.glob("*.yaml") if not path.name.startswith("_"))
