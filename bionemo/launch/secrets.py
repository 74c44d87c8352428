# SPDX-License-Identifier: Apache-2.0
"""Refuse to write secrets to the files of a job. Jobs read secrets from their environment or from the platform."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.redaction import environment_secrets, find_secrets, split_arguments


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
    for key, _ in (*find_secrets(config), *find_secrets(split_arguments(arguments))):
        raise UserError(
            f"{key} contains a secret, which would be written to the files of the job: remove it and set it in the "
            "environment, which jobs inherit; on BCP and Kubernetes, name a secret of the platform in "
            "cluster.secrets; put passwords of downloads into ~/.netrc"
        )
    for name, value in environment_secrets(environment).items():
        for path, text in files.items():
            if value in text:
                raise UserError(
                    f"the value of ${name} would be written to {path.name}: remove it; jobs inherit the variable"
                )


def check_secret_names(entries: Sequence[str], expected: re.Pattern[str], key: str = "secrets") -> None:
    """Check that `cluster.secrets`, or another key of `cluster`, contains names.

    Raises:
        UserError: if an entry does not match the pattern.
    """
    for number, entry in enumerate(entries):
        if not expected.fullmatch(entry):
            raise UserError(
                f"cluster.{key}[{number}] must be the NAME of a secret of the platform, NAME:KEY or "
                "NAME:KEY:ALIAS, where KEY and ALIAS are names, not the secret itself"
            )
