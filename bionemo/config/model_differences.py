# SPDX-License-Identifier: Apache-2.0
"""Differences between two `model` sections of configurations."""

from collections.abc import Iterator, Mapping
from typing import Any


def differences(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, saved value and current value of keys that both have, where the values differ."""
    if saved.get("kv_channels") != config.get("kv_channels"):  # otherwise the numbers of heads suffice
        saved, config = _with_head_size(saved), _with_head_size(config)
    old_values = dict(_flatten(saved))
    for key, value in _flatten(config):
        if key in old_values and not _equal(old_values[key], value):
            yield key, old_values[key], value


def _with_head_size(config: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden, heads = (_to_number(config.get(key)) for key in ("hidden_size", "num_attention_heads"))
    if config.get("kv_channels") is not None or not hidden or not heads:
        return config
    return {**config, "kv_channels": int(hidden // heads)}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(saved: Any, value: Any) -> bool:
    """Compare values; a `.nemo` file may contain numbers as text, because YAML reads 1e-5 as text."""
    if isinstance(saved, str) and "${" in saved:  # an unresolved reference to another key
        return True
    if isinstance(saved, list | tuple) and isinstance(value, list | tuple):
        return len(saved) == len(value) and all(map(_equal, saved, value))
    number = _to_number(value)
    return bool(saved == value or (number is not None and number == _to_number(saved)))


def _to_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
