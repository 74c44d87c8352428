# SPDX-License-Identifier: Apache-2.0
"""The nearest right name for a wrong one. A hint is a courtesy: nothing here may raise."""

import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_CLOSE = 0.6


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """Give " (did you mean X?)", or nothing when no name comes close.

    Keys are compared both whole and by their last part, so a right name in the wrong place is found too.
    """
    try:
        score, best = max(((_likeness(wrong, name), name) for name in right), default=(0.0, ""))
    except Exception:  # whatever went wrong, the user's own mistake is the one to report
        return ""
    return f" (did you mean {best}?)" if score >= _CLOSE else ""


def _likeness(a: str, b: str) -> float:
    whole = SequenceMatcher(None, a.lower(), b.lower()).ratio()
    last = SequenceMatcher(None, a.lower().rpartition(".")[2], b.lower().rpartition(".")[2]).ratio()
    return (whole + last) / 2


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """A type in words: "int or null", "one of crop, drop"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if len(alternatives(hint)) > 1:
        return " or ".join(map(describe, alternatives(hint)))
    if hint is type(None):
        return "null"
    if get_origin(hint) is list:
        return f"a list of {describe(get_args(hint)[0])}"
    if get_origin(hint) is dict or is_dataclass(hint):
        return "a group of keys"
    return getattr(hint, "__name__", str(hint))


def all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every full key that a dataclass allows."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        key = f"{prefix}{field.name}"
        yield key
        for hint in alternatives(hints[field.name]):
            if is_dataclass(hint):
                yield from all_keys(hint, f"{key}.")  # type: ignore[arg-type]
