# SPDX-License-Identifier: Apache-2.0
"""Configurations of v1."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf


def v1_overrides(model: str) -> list[str]:
    """Return the table as `++key=value`."""
    section, group = "", ""
    overrides: list[str] = []
    for line in (Path(__file__).parent / "v1_keys.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section == model and line.startswith(" "):
            overrides.append(f"++{'' if group == 'top' else group + '.'}{line.strip()}")
        else:
            group = line
    return overrides


def v1_base(model: str) -> str:
    """Return the table as a file of v1, like its base_config.yaml."""
    config = OmegaConf.create()
    for override in v1_overrides(model):
        key, _, text = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, _scalar(text))
    return OmegaConf.to_yaml(config)


def _scalar(text: str) -> Any:
    """Parse a value; `,` and `date: today` are text."""
    if text == "," or ": " in text:
        return text
    return yaml.safe_load(text)
