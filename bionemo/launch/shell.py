# SPDX-License-Identifier: Apache-2.0
"""Shell text in which every value is quoted, so that no value is executed."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from bionemo.common.errors import UserError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def lines(parts: Iterable[str | Sequence[str]], indent: str = "    ") -> str:
    """Return a shell command with one line per part; a part is an argument or several."""
    return f" \\\n{indent}".join(shlex.join([part] if isinstance(part, str) else part) for part in parts)


def exports(variables: Mapping[str, str | None]) -> list[str]:
    """Return lines that export `cluster.env_vars`, and unset those without a value.

    Raises:
        UserError: if a name is not valid.
    """
    return [
        f"unset {variable(name)}" if value is None else f"export {variable(name)}={shlex.quote(value)}"
        for name, value in variables.items()
    ]


def variable(name: str) -> str:
    """Check a key of `cluster.env_vars` and return it.

    Raises:
        UserError: if it is not a valid name of an environment variable.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"cluster.env_vars.{name}: this is not a valid name of an environment variable")
    return name


def one_line(key: str, value: str) -> str:
    """Check that a value has no line break or control character, and return it.

    Raises:
        UserError: if it has.
    """
    if not value.isprintable():
        raise UserError(f"{key} is {value!r}, expected one line of text")
    return value
