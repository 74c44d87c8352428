# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in all text that is written or printed.

A value is secret because of its name (api_key, HF_TOKEN), because it is the value of a secret environment variable or
setting, because of its format (ghp_..., a private key, a signed URL), or because of its position in a URL. Nested
values are redacted before they are converted to text, so that quoting and line breaks cannot hide a secret.
"""

import base64
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from bionemo.common.secret_names import is_harmless_value, is_secret_name

HIDDEN = "***"
_SHORTEST = 6  # characters; shorter values may occur by chance
_LONG = 12  # minimum length of a value that is treated as a key because of its form alone
_SETTINGS = ("enabled", "disabled", "default", "required", "optional", "anonymous", "offline", "online")
_FORMATS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|(?<![A-Za-z0-9_])(?:"
    r"(?:hf|api_org|npm|gh[pousr]|r8)_[A-Za-z0-9]{16,}"
    r"|(?:github_pat|wandb_v\d|dckr_pat|glpat|gldt|glptt|glrt|nvapi|pypi)[-_][A-Za-z0-9_-]{16,}"
    r"|(?:sk|rk|pk)[-_](?=[\w-]*\d)[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|GOCSPX-[A-Za-z0-9_-]{16,}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"
    r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|dapi[0-9a-f]{32}|do[opr]_v1_[0-9a-f]{40,}|hv[sb]\.[A-Za-z0-9_-]{16,}"
    r"|AGE-SECRET-KEY-1[A-Z0-9]{20,}"
    r")",
    re.DOTALL,
)
_HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\\\"']*\s*[:=]\s*[\\\"']*|\bbearer\s+)"
    r"((?:(?:basic|bearer|token|digest|negotiate)\s+)?[^\s\"',;]{6,})"
)
# up to the last @ if there is a password, which may contain any of @/?#, and no port; else up to the path's first /
_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#:@\"\[]*:(?!\d*(?:[/?#,;\s]|$))[^\s\"]*|[^\s/?#\"<>]+)@")
_QUERY = re.compile(r"([?&;#])([\w.~%-]+)=([^\s&#;\"'<>]+)")
_OF_QUERIES = ("key", "keys", "sig", "sign", "signature", "code", "auth", "session", "sid", "ticket", "pass")
# a name and the separator between it and its value
_NAME = re.compile(
    r"(?<![\w.-])(?P<option>--?)?(?P<name>[A-Za-z_][\w.-]*)"
    r"(?P<between>[\\\"'\]]*\s*(?:=>|:=|=)\s*|[\\\"'\]]*:(?=\S)|(?P<spaced>[\\\"'\]]*\s*:\s+)|(?P<blank>\s+))"
)
_BEFORE_KEYS = re.compile(r"(?:\A|[\n{\[(,|\"'\\])[ \t]*(?:- )?\Z")
_VALUE = re.compile(
    r"(?P<quotes>\\+[\"'])(?P<escaped>.*?)(?P=quotes)|\"(?P<double>(?:[^\"\\]|\\.)*)\"|'(?P<single>(?:[^'\\]|\\.)*)'"
    r"|[|>][+-]?[ \t]*\n(?P<block>(?:[ \t]+[^\n]*\n?)+)"
    r"|(?P<plain>(?:(?![,;&]\s*[\w.-]+\s*[=:])\S)+)",
    re.DOTALL,
)


class Redactor:
    """Hides secrets in text, nested values and command lines.

    Args:
        values: secrets to hide wherever they occur, in any encoding, in addition to those found by name, format or
            position.
        found: set to which secrets found by name or in URLs are added; None: they are not collected.
    """

    def __init__(self, values: Iterable[str] = (), found: set[str] | None = None) -> None:
        patterns = {pattern for value in values for pattern in _encodings(value)}
        self._known = re.compile("|".join(sorted(patterns, key=len, reverse=True))) if patterns else None
        self._found = found

    def text(self, text: str) -> str:
        """Hide secrets in a text."""
        shown = self._text(text)
        if "%" in shown and (decoded := unquote(shown)) != shown and (hidden := self._text(decoded)) != decoded:
            return hidden
        return shown

    def tree(self, tree: Any, secret_name: str = "") -> Any:
        """Hide secrets in nested mappings and lists; booleans, None and class paths under `_target_` are kept.

        Args:
            tree: plain values.
            secret_name: name of a secret of which the whole tree is the value; "" if there is none.
        """
        if isinstance(tree, Mapping):
            return {
                self.tree(key): value
                if key == "_target_"
                else self.tree(value, secret_name or (str(key) if is_secret_name(str(key)) else ""))
                for key, value in tree.items()
            }
        if isinstance(tree, list | tuple):
            if not secret_name and all(isinstance(item, str) for item in tree):
                return self.arguments(tree)
            return [self.tree(item, secret_name) for item in tree]
        if secret_name:
            return tree if is_harmless_value(tree) else self._hide(str(tree))
        return self.text(tree) if isinstance(tree, str) else tree

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """Hide secrets in command-line arguments: `key=value`, `--key=value`, `--key value`, and in values."""
        shown, hide_next = [], False
        for argument in arguments:
            key, equals, value = argument.partition("=")
            name = key.lstrip("+-~").partition("@")[0]
            secret = re.fullmatch(r"[\w.-]+", name) is not None and is_secret_name(name)
            if hide_next:
                shown.append(self._hide(argument))
            elif equals and secret:
                shown.append(argument if is_harmless_value(value) else f"{key}={self._hide(value)}")
            else:
                shown.append(self.text(argument))
            hide_next = not equals and argument.startswith("-") and secret
        return shown

    def _text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _FORMATS.sub(HIDDEN, text)
        text = _HEADER.sub(lambda match: match[1] + self._hide(match[2]), text)
        text = _USER.sub(self._user, text)
        text = _QUERY.sub(self._parameter, text)
        return "".join(self._redact_assignments(text))

    def _user(self, match: re.Match[str]) -> str:
        name, colon, password = match[2].partition(":")
        return f"{match[1]}{self._hide(password or name, learn=bool(colon) or len(name) >= _LONG)}@"

    def _parameter(self, match: re.Match[str]) -> str:
        name = unquote(match[2])
        if not is_secret_name(name) and name.lower() not in _OF_QUERIES:
            return match[0]
        return f"{match[1]}{match[2]}={self._hide(match[3])}"

    def _redact_assignments(self, text: str) -> Iterator[str]:
        """Yield the parts of a text, with the values of secret names hidden."""
        done = 0
        for match in _NAME.finditer(text):
            if match.start() < done or not _is_assignment(text, match):
                continue
            value = _VALUE.match(text, match.end())
            if value is None:
                continue
            content = next((part for part in value.group("escaped", "double", "single", "block", "plain") if part), "")
            if match["spaced"] is not None and value["plain"] and not _is_key(text, match):
                continue
            if content.startswith(HIDDEN) or is_harmless_value(content.rstrip(",;.)]}")):
                continue
            yield text[done : match.end()]
            yield self._hide(content, learn="=" in match["between"])
            done = value.end()
        yield text[done:]

    def _hide(self, value: str, learn: bool = True) -> str:
        if learn and self._found is not None and value != HIDDEN and not value.startswith("${"):
            self._found.add(value)
        return HIDDEN


def _is_assignment(text: str, match: re.Match[str]) -> bool:
    """Return whether a name is that of a secret and is followed by its value."""
    name: str = match["name"]
    if match["blank"] is not None:  # --password VALUE
        return match["option"] is not None and is_secret_name(name)
    if "=" in match["between"]:
        return is_secret_name(name)
    is_path = match.start() > 0 and text[match.start() - 1] == "/"
    return not is_path and is_secret_name(name.rpartition(".")[2])  # the extension of a file name is not a name


def _is_key(text: str, match: re.Match[str]) -> bool:
    """Return whether a name before a colon and a space is a key of YAML, JSON or Python, not a word of a sentence."""
    return "." not in match["name"] and _BEFORE_KEYS.search(text[: match.start()]) is not None


def _encodings(value: str) -> Iterator[str]:
    """Yield patterns of a secret: plain, escaped, split over lines, percent-encoded, hexadecimal and base64."""
    plain = value.strip()
    if len(plain) < _SHORTEST:
        return
    written = {
        plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(plain)[1:-1],
        plain.replace("'", "''"), plain.replace("'", "'\"'\"'"), plain.encode().hex(),
        quote(plain), quote(plain, safe=""), quote_plus(plain),
        re.sub(r"[^\0-\x7f]", _yaml_escape, json.dumps(plain, ensure_ascii=False)[1:-1]),
    }  # fmt: skip
    for form in written:
        yield r"\\?\s+\\?(?:\\ )?".join(map(re.escape, form.split()))
    yield re.sub("%..", lambda code: code[0].lower(), re.escape(quote(plain, safe="")))
    if len(plain) >= 8:
        for offset in range(3):  # in the encoded bytes; characters that share bits with other bytes are omitted
            encoded = base64.b64encode(bytes(offset) + plain.encode()).decode().rstrip("=")
            core = encoded[(0, 2, 3)[offset] : len(encoded) - ((offset + len(plain.encode())) % 3 > 0)]
            yield re.escape(core)
            yield re.escape(core.replace("+", "-").replace("/", "_"))


def _yaml_escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02X}" if number < 1 << 8 else f"\\u{number:04X}" if number < 1 << 16 else f"\\U{number:08X}"


_registered: set[str] = set()


def register_secrets(tree: Any) -> None:
    """Hide the secrets found by name or in URLs of a configuration or command line in all later output."""
    found: set[str] = set()
    Redactor(found=found).tree(tree)
    for value in found:  # [NAME:KEY] contains a secret, too
        parts = re.split(r"[\s\[\]{},:'\"]+", value)
        _registered.update(part for part in parts if len(part) >= _LONG and re.search(r"\d", part))
        _registered.update([value] if len(value.strip()) >= _SHORTEST else [])


def contains_value(secret: str, text: str) -> bool:
    """Return whether a secret is in a text, plain or encoded."""
    return any(re.search(pattern, text) for pattern in _encodings(secret))


def contains_secret(text: str) -> bool:
    """Return whether a text contains a secret of a known format, or a known secret value that is not a plain word."""
    known = {*environment_secrets().values(), *_registered}
    return bool(_FORMATS.search(text)) or any(
        len(value) >= _LONG - 4 and not value.isalpha() and value in text for value in known
    )


def environment_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets among environment variables by name: their values, or the passwords in URLs."""
    secrets = {}
    for name, value in environment.items():
        if is_secret_name(name):
            if len(value.strip()) >= _SHORTEST and value.lower() not in _SETTINGS and not _is_path(value):
                secrets[name] = value
        elif "://" in value and (user := _USER.search(value)):
            password = user[2].partition(":")[2] or user[2]
            if len(password) >= _SHORTEST:
                secrets[name] = password
    return secrets


def redact_text(text: str) -> str:
    """Hide secrets in a text."""
    return _redactor().text(text)


def redact_tree(tree: Any) -> Any:
    """Hide secrets in nested mappings and lists, by name and by value."""
    return _redactor().tree(tree)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide secrets in the arguments of a command line."""
    return _redactor().arguments(arguments)


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


def _redactor() -> Redactor:
    return _redactor_of(frozenset(environment_secrets().values()) | _registered)


_redactor_of = lru_cache(maxsize=8)(Redactor)


@lru_cache(maxsize=256)
def _is_path(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)
