# SPDX-License-Identifier: Apache-2.0
"""Convert overrides of a command line to Hydra's syntax.

Hydra requires a prefix (`+`, `++`) for new keys and cannot parse values such as x[000..049]. Here every key may be
written with or without prefix, because the schema shows whether it exists, and values that Hydra cannot parse are
quoted.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString, Sweep
from hydra.errors import HydraException

from bionemo.common.errors import UserError
from bionemo.config.hints import alternatives, did_you_mean, with_subclasses
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import RunConfig

_OVERRIDE = re.compile(r"(?P<prefix>~|\+{0,2})(?P<key>[^=~+\s]+)(?:=(?P<value>.*))?", re.DOTALL)
_LIST_ITEM = re.compile(r"(?:[^,\[({<]|[\[({<][^\])}>]*[\])}>])+")  # commas inside brackets belong to the item
# Groups that our configurations place inside another one: `data=mock` replaces the one at model.data.
_PACKAGES = {"data": "data@model.data", "optim": "optim@model.optim"}


def rewrite_override(override: str, group_options: Callable[[str], list[str]], sweep: bool = False) -> str:
    """Convert one override.

    Args:
        override: `key=value`, `+key=value`, `++key=value`, `~key` or `group=choice`.
        group_options: returns the configurations in a group, or an empty list if the group does not exist.
        sweep: whether commas separate the values of a sweep.

    Raises:
        UserError: if the text is not an override.
    """
    match = _OVERRIDE.fullmatch(override)
    if not match or (match["value"] is None and match["prefix"] != "~"):
        raise UserError(f"cannot read '{override}': write key=value")
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if prefix == "~" or key.startswith(("hydra.", "hydra/")):
        return override
    key = _PACKAGES.get(key.removeprefix("model."), key)
    group = key.partition("@")[0]
    options = [] if "." in group else group_options(group)  # looking up a group takes Hydra 10 ms
    if (options or "@" in key) and not value.startswith("{"):  # {..} sets keys of a node that has a group's name
        if not options:
            groups = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
            raise UserError(f"no group '{group}'{did_you_mean(group, groups)}: available: {', '.join(groups)}")
        if value.lower() in ("", "null"):
            raise UserError(f"{group} is a group: choose one of {', '.join(options)}")
        return f"{prefix.replace('++', '')}{key}={value}"
    return f"++{match['key']}={quote_if_needed(match['key'], value, sweep)}"


def quote_if_needed(key: str, value: str, sweep: bool) -> str:
    """Quote a value that Hydra cannot parse, or would not read as text where the key expects text."""
    types = list(_accepted_types(key))
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")._value
    except HydraException:
        if list in types and value.startswith("[") and value.endswith("]"):
            return f"[{','.join(map(quote, _LIST_ITEM.findall(value[1:-1])))}]"
        return quote(value)
    is_sweep = isinstance(parsed, Sweep)
    is_text = str in types and not {bool, int, float, type(parsed)}.intersection(types)
    keeps_meaning = not is_text or isinstance(parsed, str | QuotedString | None)
    if sweep if is_sweep else keeps_meaning:
        return value
    if is_sweep and str not in types:
        raise UserError(f"{key}={value} has several values: add --multirun to run one after the other")
    return quote(value)


def _accepted_types(key: str) -> Iterator[Any]:
    """Yield the types that any schema accepts for a full key, without parameters: list[str] is list."""
    options: list[Any] = [RunConfig]
    for name in key.split("."):
        groups = [each for option in options if is_dataclass(option) for each in with_subclasses(option)]
        hints = [_type_hints(group).get(name) for group in groups]
        hints += [get_args(option)[1] for option in options if get_origin(option) is dict]
        options = [option for hint in hints if hint is not None for option in alternatives(hint)]
    for option in options:
        yield str if get_origin(option) is Literal else get_origin(option) or option


@cache
def _type_hints(group: type) -> dict[str, Any]:
    return get_type_hints(group)


def quote(value: str) -> str:
    r"""Quote for Hydra's grammar. Only before a quote, \\ means a backslash and \' means a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"
