# SPDX-License-Identifier: Apache-2.0
"""The file and line that set each value of a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf


def find_origins(loader: ConfigLoader, name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Return `FILE:LINE` or `command line` of each key that the files of a configuration or the overrides set.

    Args:
        loader: Hydra's loader of the configuration.
        name: name of the configuration.
        overrides: in Hydra's syntax.
    """
    directories = [Path(each.path.removeprefix("file://")) for each in loader.get_search_path().get_path()]
    found: dict[str, str] = {}
    for default in loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults:
        candidates = (directory / f"{default.config_path}.yaml" for directory in directories)
        path = next((each for each in candidates if each.is_file()), None)
        if path:
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            for key, line in _lines(yaml.compose(path.read_text()), f"{default.package}." if default.package else ""):
                found[key] = f"{shown}:{line}"
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        found[override.key_or_group] = "command line"
    return found


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _lines(value, f"{prefix}{key.value}.")


def describe_values(cfg: DictConfig, origins: Mapping[str, str], package: str, resolve: bool) -> Iterator[str]:
    """Yield a line for each value in a part of a configuration: the key, the value and its origin.

    Args:
        cfg: the configuration.
        origins: of keys, or of the groups of keys that contain them.
        package: the part, or "" for all.
        resolve: whether references to other keys are replaced by their values.
    """
    for key, value in _values(OmegaConf.to_container(cfg, resolve=resolve), ""):
        parents = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
        origin = next((origins[each] for each in parents if each in origins), "set by the command")
        if f"{key}.".startswith(f"{package}." if package else ""):
            yield f"{key}={value}  # {origin}"


def _values(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict) or not node:
        yield key, "null" if node is None else node
    else:
        for name, value in node.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
