# SPDX-License-Identifier: Apache-2.0
"""Configurations as v1 has them."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf


def v1_overrides(model: str) -> list[str]:
    """The table as `++key=value`."""
    section, group = "", ""
    words: list[str] = []
    for line in (Path(__file__).parent / "v1_keys.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section == model and line.startswith(" "):
            words.append(f"++{'' if group == 'top' else group + '.'}{line.strip()}")
        else:
            group = line
    return words


def v1_base(model: str) -> str:
    """The table as a file of v1, such as its base_config.yaml."""
    config = OmegaConf.create()
    for word in v1_overrides(model):
        key, _, text = word.lstrip("+").partition("=")
        OmegaConf.update(config, key, _scalar(text))
    return OmegaConf.to_yaml(config)


def _scalar(text: str) -> Any:
    """`,` and `date: today` are text."""
    if text == "," or ": " in text:
        return text
    return yaml.safe_load(text)
