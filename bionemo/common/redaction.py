# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in all text that is written or printed.

These are secret: the values of keys and environment variables with secret names (api_key, HF_TOKEN), and the password
in `https://user:password@host`. Such values are hidden wherever they occur unchanged. `tokens`, which counts tokens,
and `secrets`, which lists names of secrets of a platform, are not secret names.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_SHORTEST = 6  # characters; shorter values may occur by chance
_SETTINGS = ("enabled", "disabled", "default", "required", "optional", "anonymous", "offline", "online")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SECRET = re.compile(
    r"token|.*(?:password|passwd|sshpass)|(?:.*_)?(?:"
    r"auth|authorization|bearer|connection_?string|cookies?|credentials?|dsn|hmac|jwt|passphrase|pat|pwd|sas|secret"
    r"|signature|webhook(?:_url)?|access_?key_id"
    r"|(?:access|account|api|auth|encryption|license|private|secret|session|signing|ssh|storage|wandb)_?keys?"
    r"|(?:access|api|auth|bearer|bot|git(?:hub|lab)|hf|hub|id|job|refresh|secret|service|session|wandb)_?token"
    r"|(?:access|api|auth|refresh)_?tokens)"
)
_VARIABLE = re.compile(r"[A-Z0-9_]+(?<!PUBLIC)_(?:KEY|PASS|TOKEN)")  # of the environment
_SWITCHES = frozenset(("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"))
_NOT_SECRET = frozenset(("PWD", "OLDPWD"))  # directories set by the shell
_PASSWORD = re.compile(r"(?<=://)([^\s/?#:@\"]*:)([^\s/?#@\"]+)(?=@)")

_registered: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a name, or a part of a dotted key, names a secret: WANDB_API_KEY, wandbKey, not tokenizer."""
    return any(_is_secret_part(part) for part in name.split("."))


def is_harmless_value(value: object) -> bool:
    """Return whether a value under a secret name is not secret: a boolean, nothing, or the name of a variable."""
    text = str(value)
    return value is None or text.lower() in _SWITCHES or (text.isupper() and "_" in text and is_secret_name(text))


def find_secrets(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each secret in nested mappings and lists."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from find_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from find_secrets(item, key)
    elif is_secret_name(key):
        if not is_harmless_value(tree):
            yield key, str(tree)
    elif isinstance(tree, str):
        yield from ((key, match[2]) for match in _PASSWORD.finditer(tree))


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` and `--key=value` by key, and of `--key value`."""
    values: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        key, equals, value = argument.partition("=")
        values[key.lstrip("+-~")] = value if equals or not argument.startswith("-") else following
    return values


def register_secrets(tree: Any) -> None:
    """Hide the secrets of a configuration in all later output."""
    _registered.update(value for _, value in find_secrets(tree) if len(value.strip()) >= _SHORTEST)


def environment_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets among environment variables by name: their values, or the passwords in URLs."""
    return {
        name: value
        for name, value in find_secrets(environment)
        if len(value.strip()) >= _SHORTEST and value.lower() not in _SETTINGS and not _is_path(value)
    }


def known_secrets() -> list[str]:
    """Return the secrets of the environment and the registered ones, the longest first."""
    return sorted({*environment_secrets().values(), *_registered}, key=len, reverse=True)


def redact_text(text: str, secrets: Sequence[str] | None = None) -> str:
    """Hide secrets in a text: `known_secrets()`, unless they are given."""
    for value in known_secrets() if secrets is None else secrets:
        text = text.replace(value, HIDDEN)
    return _PASSWORD.sub(rf"\1{HIDDEN}", text)


def redact_tree(tree: Any, key: str = "", secrets: Sequence[str] | None = None) -> Any:
    """Hide secrets in nested mappings and lists, by name and by value; `key` is the name of a tree."""
    secrets = known_secrets() if secrets is None else secrets
    if isinstance(tree, Mapping):
        pairs = ((redact_tree(name, "", secrets), name, value) for name, value in tree.items())
        return {shown: redact_tree(value, f"{key}.{name}", secrets) for shown, name, value in pairs}
    if isinstance(tree, list | tuple):
        return [redact_tree(item, key, secrets) for item in tree]
    if is_secret_name(key):
        return tree if is_harmless_value(tree) else HIDDEN
    return redact_text(tree, secrets) if isinstance(tree, str) else tree


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide secrets in the arguments of a command line."""
    shown = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_secret = equals and is_secret_name(key.lstrip("+-~")) and not is_harmless_value(value)
        shown.append(f"{key}={HIDDEN}" if is_secret else redact_text(argument))
    return shown


class LogFilter(logging.Filter):
    """Hides secrets in the messages and tracebacks that a handler writes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record; every record passes."""
        record.msg, record.args = redact_text(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact_text(record.exc_text)
        return True


@lru_cache(maxsize=256)
def _is_path(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)


def _is_secret_part(name: str) -> bool:
    if name in _NOT_SECRET:
        return False
    words = _CAMEL.sub("_", name).replace("-", "_").lower()
    return bool(_SECRET.fullmatch(words) or _VARIABLE.fullmatch(name))
