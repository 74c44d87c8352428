# SPDX-License-Identifier: Apache-2.0
"""The words of a command line, made fit for Hydra.

Hydra wants to be told whether a key is new (`+`, `++`) and chokes on values such as x[000..049]. Here a key may be
written either way, since the check finds out whether it exists, and what Hydra cannot read is quoted for it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString, Sweep
from hydra.errors import HydraException

from bionemo.common.errors import UserError
from bionemo.config.hints import alternatives, did_you_mean
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import SCHEMAS, ModelConfig, RunConfig

_OVERRIDE = re.compile(r"(?P<prefix>~|\+{0,2})(?P<key>[^=~+\s]+)(?:=(?P<value>.*))?", re.DOTALL)
_LIST_ITEM = re.compile(r"(?:[^,\[({<]|[\[({<][^\])}>]*[\])}>])+")  # commas inside brackets belong to the item
# Groups that our configs place inside another: `data=mock` means the one they have.
_PLACES = {"data": "data@model.data", "optim": "optim@model.optim"}


def rewrite(word: str, group_options: Callable[[str], list[str]], sweep: bool = False) -> str:
    """Give a word of the command line as Hydra wants it.

    Args:
        word: `key=value`, `+key=value`, `++key=value`, `~key` or `group=choice`.
        group_options: the configs in a group; an empty list when there is no such group.
        sweep: whether commas separate values to try one after the other.

    Raises:
        UserError: when the word is none of these.
    """
    match = _OVERRIDE.fullmatch(word)
    if not match or (match["value"] is None and match["prefix"] != "~"):
        raise UserError(f"cannot read '{word}': write key=value")
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if prefix == "~" or key.startswith(("hydra.", "hydra/")):
        return word
    key = _PLACES.get(key.removeprefix("model."), key)
    group = key.partition("@")[0]
    options = [] if "." in group else group_options(group)  # which Hydra takes a hundredth of a second to look up
    if (options or "@" in key) and not value.startswith("{"):  # {..} sets values in a node of that name
        if not options:
            raise UserError(f"no group '{group}'{did_you_mean(group, _groups())}: there are {', '.join(_groups())}")
        if value.lower() in ("", "null"):
            raise UserError(f"{group} is a group: choose one of {', '.join(options)}")
        return f"{prefix.replace('++', '')}{key}={value}"
    return f"++{match['key']}={quote_where_needed(match['key'], value, sweep)}"


def quote_where_needed(key: str, value: str, sweep: bool) -> str:
    """Quote a value that Hydra cannot read, or would read as something else than the text its key wants."""
    types = list(_types_of(key))
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        if list in types and value.startswith("[") and value.endswith("]"):
            return f"[{','.join(map(_quoted, _LIST_ITEM.findall(value[1:-1])))}]"
        return _quoted(value)
    several = isinstance(parsed._value, Sweep)
    if (sweep and several) or _fits(parsed._value, types):
        return value
    if several and str not in types:
        raise UserError(f"{key}={value} has several values: add --multirun to run one after the other")
    return _quoted(value)


def _fits(value: Any, types: list[Any]) -> bool:
    if isinstance(value, Sweep):
        return False
    if str not in types or any(option in types for option in (bool, int, float)):
        return True  # numbers are read as Hydra reads them
    return value is None or isinstance(value, str | QuotedString) or type(value) in types


def _groups() -> list[str]:
    return sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())


def _types_of(key: str) -> Iterator[Any]:
    """What the schemas allow at a full key: bare types, so that list[str] counts as list."""
    options: list[Any] = [RunConfig]
    for name in key.split("."):
        groups: list[Any] = [option for option in options if is_dataclass(option)]
        groups += SCHEMAS.values() if ModelConfig in groups else ()
        hints = [_hints(group).get(name) for group in groups]
        options = [option for hint in hints if hint is not None for option in alternatives(hint)]
    for option in options:
        yield str if get_origin(option) is Literal else get_origin(option) or option


@cache
def _hints(group: type) -> dict[str, Any]:
    return get_type_hints(group)


def _quoted(value: str) -> str:
    r"""Quote for Hydra's grammar, in which backslashes count only before a quote: \\ is one, \' a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"
