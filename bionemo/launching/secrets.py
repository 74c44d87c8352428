# SPDX-License-Identifier: Apache-2.0
"""Nothing that starts a run holds a secret: jobs get them through their environment, or from the platform."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bionemo.errors import UserError
from bionemo.interop.redact import is_secret

_LONG = 6  # characters: a shorter value is no secret, and may stand anywhere by chance


def refuse_secrets(
    config: Mapping[str, Any], files: Mapping[Path, str], environment: Mapping[str, str] = os.environ
) -> None:
    """See that none would be written.

    Args:
        config: the whole configuration.
        files: what would be written.
        environment: of this process.

    Raises:
        UserError: naming where one was given, and never itself.
    """
    if found := next(_given(config, ""), None):
        raise UserError(
            f"{found}: a secret would stand in the files of the job: leave it out, and set it in the environment, "
            "where jobs find it (on BCP: cluster.secrets)"
        )
    for name, value in environment.items():
        if is_secret(name) and len(value) >= _LONG:
            for path, text in files.items():
                if value in text:
                    raise UserError(f"the value of ${name} would stand in {path.name}: jobs find it by its name alone")


def _given(value: Any, key: str) -> Iterator[str]:
    """Keys that name a secret and have a value."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _given(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _given(below, f"{key}[{number}]")
    elif value is not None and is_secret(key):
        yield key
