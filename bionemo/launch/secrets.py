# SPDX-License-Identifier: Apache-2.0
"""Refuse to write secrets to the files of a job. Jobs read secrets from their environment or from the platform."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.redaction import Redactor, contains_value, environment_secrets

_NAMES = (("cluster", "secrets"), ("cluster", "image_pull_secrets"))  # names of secrets; see check_secret_names
_KEY = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9+/=]{16,}")  # matches API keys, but not names of secrets


def refuse_secrets(
    config: Mapping[str, Any],
    arguments: Sequence[str],
    files: Mapping[Path, str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Check that no secret would be written.

    Args:
        config: the resolved configuration.
        arguments: arguments of the command line that become part of the job.
        files: content of the files to be written, by path.
        environment: environment variables of this process.

    Raises:
        UserError: if a secret would be written. The message names the key or variable, not the secret.
    """
    plain = Redactor()  # without values of environment variables: these are searched in the files below
    found = next(_different(config, plain.tree(config), ()), None)
    if found is None:
        shown = plain.arguments(arguments)
        found = next((old.partition("=")[0] for old, new in zip(arguments, shown, strict=True) if old != new), None)
    if found is not None:
        raise UserError(
            f"{found} contains a secret, which would be written to the files of the job: remove it and set it in the "
            "environment, which jobs inherit; on BCP and Kubernetes, name a secret of the platform in "
            "cluster.secrets; put passwords "
            "of downloads into ~/.netrc"
        )
    for name, value in environment_secrets(environment).items():
        for path, text in files.items():
            if contains_value(value, text):
                raise UserError(
                    f"the value of ${name} would be written to {path.name}: remove it; jobs inherit the variable"
                )


def check_secret_names(entries: Sequence[str], expected: re.Pattern[str], key: str = "secrets") -> None:
    """Check that `cluster.secrets`, or another key of `cluster`, contains names, not secrets.

    Raises:
        UserError: if an entry does not match the pattern, or contains a secret.
    """
    for number, entry in enumerate(entries):
        if not expected.fullmatch(entry) or _is_secret(entry):
            raise UserError(
                f"cluster.{key}[{number}] must be the NAME of a secret of the platform, NAME:KEY or "
                "NAME:KEY:ALIAS, where KEY and ALIAS are names, not the secret itself"
            )


def _is_secret(entry: str) -> bool:
    """Return whether an entry of cluster.secrets contains a secret instead of names."""
    redactor = Redactor(environment_secrets().values())
    return any(redactor.text(part) != part or _KEY.fullmatch(part) for part in entry.split(":"))


def _different(old: Any, new: Any, key: tuple[str, ...]) -> Iterator[str]:
    """Yield keys whose values contain a secret, and therefore differ after redaction."""
    if key in _NAMES:
        return
    if isinstance(old, Mapping):
        for (name, below), (shown, other) in zip(old.items(), new.items(), strict=True):
            if name != shown:
                yield f"a key in {'.'.join(key)}"
            yield from _different(below, other, (*key, str(name)))
    elif isinstance(old, list):
        for number, (below, other) in enumerate(zip(old, new, strict=True)):
            yield from _different(below, other, (*key[:-1], f"{key[-1]}[{number}]"))
    elif old != new:
        yield ".".join(key)
