# SPDX-License-Identifier: Apache-2.0
"""Whether weights from elsewhere are those that a configuration from elsewhere tells of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError

Shape = tuple[int, ...]
_MOST, MOST_LAYERS = 1 << 20, 1000


def compare(expected: Mapping[str, Shape], found: Mapping[str, Sequence[int]]) -> None:
    """Hold shapes against those of a configuration.

    Raises:
        UserError: that names the first few weights that are missing or too many, or one of a wrong shape.
    """
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"it lacks {len(missing)} weights: {first_few(missing)}")
    if unknown := [name for name in found if name not in expected]:
        raise UserError(f"it has {len(unknown)} unknown weights: {first_few(unknown)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise UserError(f"its {name} is {tuple(found[name])}, its configuration says {shape}")


def refuse_interpolations(value: object, key: str, path: Path) -> None:
    """Accept plain scalars, lists and mappings in a configuration that came with a model.

    Raises:
        UserError: for text that OmegaConf would evaluate (`${...}`), or take as a missing value (`???`).
    """
    if isinstance(value, Mapping):
        for name, below in value.items():
            refuse_interpolations(below, f"{key}.{name}", path)
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            refuse_interpolations(below, f"{key}[{number}]", path)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(f"{path}: {key} in its configuration is a {type(value).__name__}, expected a plain value")
    elif isinstance(value, str) and ("${" in value or value == "???"):
        raise UserError(
            f"{path}: {key} in its configuration is the interpolation {value[:40]!r}, which is not evaluated: write "
            "the value itself into the configuration"
        )


def first_few(names: list[str]) -> str:
    """Three of them."""
    return ", ".join(repr(name[:80]) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def size_of(config: Mapping[str, Any], key: str, most: int = _MOST) -> int:
    """A size that a configuration gives.

    Raises:
        UserError: when it is missing, no whole number, or out of range.
    """
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"its configuration gives no {key} from 1 to {most}")
    return value


def short(error: object) -> str:
    """What somebody else's code has to say, in a part of one line."""
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in text)
