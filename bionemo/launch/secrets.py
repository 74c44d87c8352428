# SPDX-License-Identifier: Apache-2.0
"""Refuse to write secrets into the files of a job: jobs get them through their environment, or from the platform."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.redaction import Redactor, environment_secrets, occurs

_NAMES = ("cluster", "secrets")  # holds names of the platform's secrets; bcp.py checks them


def refuse_secrets(
    config: Mapping[str, Any],
    words: Sequence[str],
    files: Mapping[Path, str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Check that no secret would be written.

    Args:
        config: the whole configuration.
        words: of the command line that go into the job.
        files: what would be written.
        environment: of this process.

    Raises:
        UserError: names the key or variable, never the secret.
    """
    plain = Redactor()  # values of environment variables are looked for in the files: some clusters resolve ${oc.env:}
    found = next(_different(config, plain.tree(config), ()), None)
    if found is None:
        shown = plain.arguments(words)
        found = next((old.partition("=")[0] for old, new in zip(words, shown, strict=True) if old != new), None)
    if found is not None:
        raise UserError(
            f"{found} holds a secret, which would be written to the files of the job: leave it out, and set it in the "
            "environment, where jobs find it; on BCP, name a secret of the platform in cluster.secrets; passwords of "
            "downloads belong in ~/.netrc"
        )
    for name, value in environment_secrets(environment).items():
        for path, text in files.items():
            if occurs(value, text):
                raise UserError(
                    f"the value of ${name} would be written to {path.name}: leave it out, jobs find it by its name"
                )


def _different(old: Any, new: Any, key: tuple[str, ...]) -> Iterator[str]:
    """Keys whose values hold a secret, and so differ after redaction."""
    if key == _NAMES:
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
