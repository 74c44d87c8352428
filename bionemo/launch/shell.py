# SPDX-License-Identifier: Apache-2.0
"""Job files from the templates in `templates/`. Filters quote every value, so that no value is executed."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bionemo.common.errors import UserError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render(template: str, **values: Any) -> str:
    """Fill in a template."""
    return _TEMPLATES.get_template(template).render(values)


def lines(parts: Iterable[str | Sequence[str]]) -> str:
    """Return a shell command with one line per part; a part is an argument or several."""
    return " \\\n    ".join(shlex.join([part] if isinstance(part, str) else part) for part in parts)


def variable(name: str) -> str:
    """Check a key of `cluster.env_vars` and return it.

    Raises:
        UserError: if it is not a valid name of an environment variable.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"cluster.env_vars.{name}: this is not a valid name of an environment variable")
    return name


def one_line(value: str, key: str) -> str:
    """Check that a value has no line break or control character, and return it.

    Raises:
        UserError: if it has.
    """
    if not value.isprintable():
        raise UserError(f"{key} is {value!r}, expected one line of text")
    return value


def _exports(variables: Mapping[str, str | None]) -> str:
    """Return lines that export `cluster.env_vars`, and unset those without a value."""
    return "\n".join(
        f"unset {variable(name)}" if value is None else f"export {variable(name)}={shlex.quote(value)}"
        for name, value in variables.items()
    )


def _yaml(value: str) -> str:
    """Return a YAML scalar of one line."""
    style = None if value.isprintable() else '"'
    return yaml.safe_dump(value, width=10_000, default_style=style).removesuffix("...\n").strip()


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {
    "quote": lambda value: shlex.quote(str(value)), "words": shlex.join, "lines": lines, "exports": _exports,
    "one_line": one_line, "variable": variable, "yaml": _yaml,
}  # fmt: skip
