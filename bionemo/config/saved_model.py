# SPDX-License-Identifier: Apache-2.0
"""The `model` section of the configuration of a saved model, outside a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf, open_dict

from bionemo.common.errors import UserError
from bionemo.config.compose import compose
from bionemo.config.paths import find_source
from bionemo.config.schema import ModelConfig
from bionemo.config.schema_reader import SchemaReader

_MAX_REPORTED = 3  # problems in one error message


@dataclass(kw_only=True)
class _Section:
    model: ModelConfig


def complete_model_section(default_config: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a file in conf/model as plain values, with those of `values` whose keys it has."""
    composed, _ = compose(find_source("pretrain"), ["name=saved", f"model={default_config}"])
    keys = set(map(str, composed.model))  # `in composed.model` would be False for a key without a default
    with open_dict(composed):
        composed.merge_with({"model": {key: value for key, value in values.items() if key in keys}})
    section: dict[str, Any] = OmegaConf.to_container(composed.model, resolve=True)  # type: ignore[assignment]
    return section


def read_model_section(section: Mapping[str, Any]) -> ModelConfig:
    """Convert a complete section of plain values to the dataclass that its `_target_` selects.

    Raises:
        UserError: if values are invalid; names the first ones.
    """
    reader = SchemaReader()
    found = reader.read(OmegaConf.create({"model": dict(section)}), _Section)
    if found is None:
        raise UserError("; ".join(reader.problems[:_MAX_REPORTED]))
    return found.model
