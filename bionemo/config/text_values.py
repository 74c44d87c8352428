# SPDX-License-Identifier: Apache-2.0
"""Keep values as they are written, in YAML files and on the command line.

YAML 1.1 and Hydra read 010, 12:00:00, no and 1e3 as 8, 43200, False and 1000.0. Here a value becomes a number or a
boolean only if Python writes it in the same way, so that nothing is lost. All others stay text, and
`schema_reader.convert` converts them where a key expects a number or a boolean.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import omegaconf._utils
import yaml
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor

_CONVERTED = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
_OPENING = re.compile(r"(\\*)\$\{")


def _is_lossless(text: str) -> bool:
    """Return whether a number or boolean is written as Python writes its value."""
    if text in ("True", "False"):
        return True
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return True
        except ValueError:
            continue
    return False


class _Loader(omegaconf._utils.get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's loader, which keeps values that a conversion would change."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node without explicit tag; see yaml.resolver.BaseResolver."""
        tag: str = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and tag in _CONVERTED and not _is_lossless(value):
            return yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        return tag


class _OverrideVisitor(HydraOverrideVisitor):
    """Hydra's reader of overrides, which keeps values that a conversion would change."""

    _in_function = False

    def visitFunction(self, ctx: Any) -> Any:
        """Read a function; the arguments of all except `choice` are numbers."""
        before, self._in_function = self._in_function, not ctx.getText().startswith("choice(")
        try:
            return super().visitFunction(ctx)
        finally:
            self._in_function = before

    def _createPrimitive(self, ctx: Any) -> Any:
        value = super()._createPrimitive(ctx)
        text = ctx.getText().strip()
        is_converted = isinstance(value, bool | int | float) and not self._in_function
        return text if is_converted and not _is_lossless(text) else value


@contextmanager
def text_kept() -> Iterator[None]:
    """Make Hydra and OmegaConf keep the text of values in YAML files and overrides in a `with` block."""
    modules: tuple[Any, Any] = overrides_parser, omegaconf._utils
    before = modules[0].HydraOverrideVisitor, modules[1].get_yaml_loader
    modules[0].HydraOverrideVisitor, modules[1].get_yaml_loader = _OverrideVisitor, lambda: _Loader
    try:
        yield
    finally:
        modules[0].HydraOverrideVisitor, modules[1].get_yaml_loader = before


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in every text of plain containers, so that OmegaConf returns the text unchanged."""
    if isinstance(value, dict):
        return {name: escape_interpolations(child) for name, child in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(child) for child in value]
    return _OPENING.sub(lambda match: match[1] * 2 + "\\${", value) if isinstance(value, str) else value
