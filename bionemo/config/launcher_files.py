# SPDX-License-Identifier: Apache-2.0
"""Read the configuration directory of NeMo-Megatron-Launcher: config.yaml, cluster/*.yaml and training/*/*.yaml."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.config.hydra_setup import register_resolvers
from bionemo.config.text_values import text_kept

_GROUPS = ("cluster", "training")  # other groups belong to stages that are not supported


def read_launcher_files(directory: Path, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return all values of config.yaml and the selected files of `cluster` and `training`, by full key.

    Arguments replace values of the files, and select the files of groups (`training=gpt3/126m`); otherwise the
    defaults list of config.yaml does. The name of a file is the value of its group's key.

    Raises:
        UserError: if a file cannot be used.
    """
    main = _read(directory / "config.yaml")
    choices: dict[str, str] = {}
    for entry in main.pop("defaults", []):
        if isinstance(entry, DictConfig):
            choices |= {str(group): str(name) for group, name in entry.items() if group in _GROUPS}
    choices |= {group: name for group, name in arguments.items() if group in _GROUPS}
    for key in list(main):  # keys such as training_config repeat the choices
        if key == "hydra" or str(key).endswith("_config"):
            del main[key]
    for group, name in choices.items():
        path = directory / group / f"{name}.yaml"
        if not path.resolve().is_relative_to(directory.resolve() / group):
            raise UserError(f"{group}={name} is not a file in {directory / group}")
        main[group] = _read(path)
    try:
        for key, value in arguments.items():
            if key not in _GROUPS:
                OmegaConf.update(main, key, value, merge=False, force_add=True)
        content = OmegaConf.to_container(main, resolve=False)
        register_resolvers()
        return {key: _plain(OmegaConf.select(main, key)) for key in _keys(content)} | choices
    except OmegaConfBaseException as error:
        raise UserError(f"{directory}: {str(error).splitlines()[0]}: set the key on the command line") from error


def _read(path: Path) -> DictConfig:
    try:
        with text_kept():
            content = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} contains no keys: a configuration file maps keys to values")
    return content


def _keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full keys of all values; a list is one value."""
    for name, child in value.items():
        key = f"{prefix}{name}"
        if isinstance(child, dict):
            yield from _keys(child, f"{key}.")
        elif child != "???":  # a value that the command line may set
            yield key


def _plain(value: Any) -> Any:
    """Return a value; a list without null, which stands for an empty list in the launcher's files."""
    return [each for each in value if each is not None] if isinstance(value, ListConfig) else value
