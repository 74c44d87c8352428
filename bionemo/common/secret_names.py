# SPDX-License-Identifier: Apache-2.0
"""Names of settings, environment variables and URL parameters whose values are secret.

Only these: `tokens` counts tokens, and `secrets` lists names of secrets of a platform.
"""

import re
from functools import lru_cache

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


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a name, or a part of a dotted key, names a secret: WANDB_API_KEY, wandbKey, not tokenizer."""
    return any(_is_secret_part(part) for part in name.split("."))


def is_harmless_value(value: object) -> bool:
    """Return whether a value under a secret name is not secret: a boolean, nothing, or the name of a variable."""
    text = str(value)
    return value is None or text.lower() in _SWITCHES or (text.isupper() and "_" in text and is_secret_name(text))


def _is_secret_part(name: str) -> bool:
    if name in _NOT_SECRET:
        return False
    words = _CAMEL.sub("_", name).replace("-", "_").lower()
    return bool(_SECRET.fullmatch(words) or _VARIABLE.fullmatch(name))
