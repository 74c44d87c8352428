# SPDX-License-Identifier: Apache-2.0
"""Checks of configurations and tensor shapes that come from untrusted files."""

from collections.abc import Mapping, Sequence
from typing import Any

from bionemo.common.errors import UserError

Shape = tuple[int, ...]
MAX_SIZE, MAX_LAYERS = 1 << 20, 1000


def check_shapes(expected: Mapping[str, Shape], found: Mapping[str, Sequence[int]]) -> None:
    """Raise a UserError if weights are missing or unknown, or a shape is not that of the configuration."""
    if missing := [name for name in expected if name not in found]:
        without_head = all(name.startswith("lm_head.") for name in missing)
        reason = ": the language-model head, which this format needs" if without_head else ""
        raise UserError(f"{len(missing)} weights are missing: {format_names(missing)}{reason}")
    if unknown := [name for name in found if name not in expected]:
        raise UserError(f"{len(unknown)} weights are unknown: {format_names(unknown)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise UserError(f"{name} has shape {tuple(found[name])}, expected {shape} from its configuration")


def get_size(config: Mapping[str, Any], key: str, largest: int = MAX_SIZE) -> int:
    """Return a positive integer of a configuration.

    Raises:
        UserError: if it is missing, not an integer, or out of range.
    """
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= largest:
        raise UserError(f"{key} in its configuration is not an integer from 1 to {largest}")
    return value


def format_names(names: Sequence[str]) -> str:
    """Format the first three names for a message."""
    return ", ".join(repr(name[:80]) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def quote_error(error: object) -> str:
    """Format an error of a library, which may quote untrusted input, as at most 100 printable characters."""
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in text)
