# SPDX-License-Identifier: Apache-2.0
"""Type hints of the schema, and suggestions for misspelt names in error messages."""

import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_MIN_SIMILARITY = 0.6


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return " (did you mean X?)", or "" if no name is similar. Never raise.

    Keys are compared as a whole and by their last part, to find a correct name under the wrong parent, too.
    """
    score, best = _MIN_SIMILARITY, ""
    try:
        for name in names:
            last = _similarity(wrong.rpartition(".")[2], name.rpartition(".")[2])
            if (last + 1) / 2 >= score:  # otherwise it cannot be the best
                score, best = max((score, best), ((_similarity(wrong, name) + last) / 2, name))
    except Exception:  # the caller is about to report the user's mistake
        return ""
    return f" (did you mean {best}?)" if best else ""


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Describe a type: "int or null", "one of crop, drop"."""
    if get_origin(hint) is Literal:
        values = [str(value) for value in get_args(hint)]
        return ("one of " if len(values) > 1 else "") + ", ".join(values)
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
    """Yield every full key (`a.b.c`) of a dataclass and those nested in it."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        key = f"{prefix}{field.name}"
        yield key
        for hint in alternatives(hints[field.name]):
            if is_dataclass(hint):
                yield from all_keys(hint, f"{key}.")  # type: ignore[arg-type]


def with_subclasses(schema: Any) -> list[Any]:
    """Return a dataclass and all dataclasses derived from it."""
    derived: list[Any] = schema.__subclasses__()
    return [schema, *(each for child in derived for each in with_subclasses(child))]
