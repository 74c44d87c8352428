# SPDX-License-Identifier: Apache-2.0
"""Where configuration files are found."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries conf/ inside the package; a checkout and an editable install have it beside the package.
CONF_DIR = next((path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir()), _PACKAGE / "conf")
CHECKOUT = CONF_DIR.parent  # or the installed package, which has its examples, too
EXAMPLES = CHECKOUT / "examples"


@dataclass(frozen=True)
class Source:
    """Which config to compose, and from where.

    Attributes:
        name: of the config, without its ending.
        directory: where it is looked for first.
        extra: directories that are searched after it, before our own `conf`.
        fallback: what lies under a config that chooses no model; None when it is this source.
        trusted: whether the user has allowed files everything (`--trust-config`).
    """

    name: str
    directory: Path
    extra: tuple[Path, ...] = ()
    fallback: "Source | None" = None
    trusted: bool = False


def source(
    default_name: str,
    default_dir: str | Path | None = None,
    config_name: str | None = None,
    config_path: str | Path | None = None,
    config_dir: str | Path | None = None,
    trusted: bool = False,
) -> Source:
    """Work out the source from the command's defaults and the user's flags.

    `config_path` takes the place of the default directory; `config_dir` is searched as well, and comes first when it
    has the config that is asked for.

    Raises:
        UserError: when a directory does not exist.
    """
    name = (config_name or default_name).removesuffix(".yaml")
    home = Path(default_dir).resolve() if default_dir else config_home(default_name)
    added = find_config_dir(config_dir) if config_dir else None
    has = added is not None and has_config(added, name) and not config_path
    if config_path:
        first = find_config_dir(config_path)
    else:
        first = home if default_dir or has or has_config(home, name) else config_home(name)
    directories = [first]
    if added is not None:
        directories.insert(0 if has else 1, added)
    extra = tuple(path for path in dict.fromkeys([*directories, home]) if path != directories[0])
    default = (name, directories[0]) == (default_name, home)
    return Source(name, directories[0], extra, None if default else Source(default_name, home), trusted)


def config_home(name: str) -> Path:
    """Directory of a config that is named without one: `conf` beside the running script, ours, or an example's.

    Of several examples it is the one that the name begins with.

    Raises:
        UserError: when several examples have one of this name.
    """
    beside = script_dir() / "conf"
    default = beside if beside.is_dir() else CONF_DIR
    if first := next((path for path in (beside, CONF_DIR) if has_config(path, name)), None):
        return first
    found = [path for path in sorted(EXAMPLES.glob("**/conf")) if has_config(path, name)]
    found = [path for path in found if name.startswith(f"{path.parent.name}_")] or found
    if len(found) > 1:
        several = ", ".join(path.parent.name for path in found)
        raise UserError(f"there is a config '{name}' in each of {several}: say which, as in --config-path={found[0]}")
    return found[0] if found else default


def find_config_dir(directory: str | Path) -> Path:
    """Give the absolute path of a directory named on the command line.

    Raises:
        UserError: when there is no such directory beside the running script or under the working directory, or it
            cannot be read: Hydra would silently take a config of that name from elsewhere.
    """
    given = Path(directory).expanduser()
    for base in (script_dir(), Path.cwd()):
        if (found := base / given).is_dir():  # an absolute path ignores the base
            if not os.access(found, os.R_OK | os.X_OK):
                raise UserError(f"config directory '{directory}' cannot be read: check the permissions and the owner")
            return found.resolve()
    raise UserError(f"config directory '{directory}' not found, neither in {script_dir()} nor in {Path.cwd()}")


def script_dir() -> Path:
    """Directory of the running script."""
    return Path(sys.argv[0] or ".").resolve().parent


def has_config(directory: Path, name: str) -> bool:
    """Whether the directory holds a config of this name."""
    return (directory / f"{name}.yaml").is_file()


def options(directory: Path) -> list[str]:
    """Names of the configs in a directory; a name that starts with `_` is a part of others."""
    return sorted(path.stem for path in directory.glob("*.yaml") if not path.name.startswith("_"))
