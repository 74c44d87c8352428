# SPDX-License-Identifier: Apache-2.0
"""Keep secrets out of everything that is written."""

import re

# the last word of a key decides: `wandb.api_key` is one, `tokenizer` and `mask_token_id` are not
_SECRET = re.compile(r"(?i)(?:^|[._\-])(?:api_?key|access_?key|secret(?:_?key)?|passw(?:or)?d|token|credentials?)$")
HIDDEN = "***"


def is_secret(key: str) -> bool:
    """Whether a key names something that must not be shown."""
    return bool(_SECRET.search(key))


def redact_arguments(arguments: list[str]) -> list[str]:
    """Hide the values of secret keys in command-line arguments, `key=value`, `--key=value` or `--key value`."""
    shown, hide_next = [], False
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if hide_next:
            shown.append(HIDDEN)
        else:
            shown.append(f"{key}={HIDDEN}" if equals and is_secret(key.lstrip("+-~")) else argument)
        hide_next = not equals and argument.startswith("-") and is_secret(argument.lstrip("-"))
    return shown


def redact_tree(value: object, key: str = "") -> object:
    """Hide the values of secret keys in nested dicts and lists."""
    if isinstance(value, dict):
        return {k: redact_tree(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact_tree(item, key) for item in value]
    return HIDDEN if value is not None and is_secret(key) else value
