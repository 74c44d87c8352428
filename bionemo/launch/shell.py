# SPDX-License-Identifier: Apache-2.0
"""Shell text of which no value is ever run: every one is quoted."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from bionemo.common.errors import UserError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def lines(parts: Iterable[str | Sequence[str]], indent: str = "    ") -> str:
    """A command over several lines: each part on its own, be it a word or several."""
    return f" \\\n{indent}".join(shlex.join([part] if isinstance(part, str) else part) for part in parts)


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that set `cluster.env_vars`.

    Raises:
        UserError: for what is no name of one.
    """
    return [f"export {variable(name)}={shlex.quote(value)}" for name, value in variables.items()]


def variable(name: str) -> str:
    """A key of `cluster.env_vars`.

    Raises:
        UserError: when it is no name of an environment variable.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"cluster.env_vars.{name}: that is no name of an environment variable")
    return name


def one_line(key: str, value: str) -> str:
    """A value that has to stand on one line.

    Raises:
        UserError: when it does not.
    """
    if not value.isprintable():
        raise UserError(f"{key} is {value!r}, expected one line of text")
    return value
