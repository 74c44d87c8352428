# SPDX-License-Identifier: Apache-2.0
"""Convert a composed configuration to the dataclasses of `schema`, collecting all problems.

OmegaConf's structured configs support neither Literal nor unions with lists, and stop at the first problem.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree
from bionemo.config.hints import all_keys, alternatives, describe, did_you_mean
from bionemo.config.schema.ranges import ANY_FLOAT, ANY_INT
from bionemo.config.targets import target_schema
from bionemo.config.v1_keys import FIXED, replacement

T = TypeVar("T")
_DEFAULT_RANGES = {int: ANY_INT, float: ANY_FLOAT}  # of numbers that are not annotated with a range
_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WRITTEN_FLOAT = re.compile(r"-?\d+\.\d+e[+-]\d+")
_WRITTEN_BOOLS = {"true": True, "false": False}  # where text is permitted, too
_MAX_LISTED = 20  # keys in an error message
_MAX_SHOWN = 80  # characters of a value in an error message


class SchemaReader:
    """Reads one configuration.

    Attributes:
        problems: errors, one phrase each.
        missing: keys without a value.
        unknown: keys that the dataclasses do not have.
        ignored: keys of v1 that were set and have no effect -> what replaced them.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self._root: type = object
        self._groups: list[tuple[type, str]] = []  # dataclass and prefix of the groups that were read
        # Problems of values that are references to others. They are reported only if there is no other problem.
        self._consequences: dict[str, str] = {}

    def read(self, cfg: DictConfig, schema: type[T]) -> T | None:
        """Return the typed configuration, or None if there are problems."""
        self._root = schema
        result = self._read_group(cfg, schema, "")
        if self.unknown:
            keys = list(dict.fromkeys(key for group in self._groups for key in all_keys(*group)))
            listing = f" (the keys are {', '.join(keys)})" if len(keys) <= _MAX_LISTED else ""
            self.problems[:0] = [f"unknown key {key}{did_you_mean(key, keys) or listing}" for key in self.unknown]
        self.problems = list(dict.fromkeys(self.problems or self._consequences.values()))
        return None if self.problems else result

    def _read_group(self, cfg: DictConfig, schema: type[T], prefix: str) -> T | None:
        """Read a node. If it has a `_target_`, that selects the dataclass."""
        before = self._count_problems()
        try:
            schema = target_schema(str(cfg["_target_"]), schema) if "_target_" in cfg else schema
        except UserError as error:
            self.problems.append(f"{prefix}_target_: {error}")
            return None
        self._groups.append((schema, prefix))
        hints, annotated = get_type_hints(schema), get_type_hints(schema, include_extras=True)
        kinds = get_args(hints.get("kind"))
        if kinds and cfg.get("kind") not in (*kinds, None):  # every other key would be wrong, too
            self.problems.append(
                f"{prefix[:-1]} has the kind {cfg['kind']}, expected {' or '.join(kinds)}: choose another"
            )
            return None
        for name in map(str, cfg):
            if name not in hints:
                self._add_undefined(cfg, name, f"{prefix}{name}")
        values = {}
        for field in fields(schema):  # type: ignore[arg-type]
            key = f"{prefix}{field.name}"
            if field.name in list(cfg):  # `in cfg` is False for a key whose value is missing
                values[field.name] = self._read_value(cfg, field.name, annotated[field.name], hints[field.name], key)
            elif field.default is MISSING and field.default_factory is MISSING:
                self._add_missing(key)
        return schema(**values) if before == self._count_problems() else None

    def _read_value(self, cfg: DictConfig, name: str, annotated: Any, hint: Any, key: str) -> Any:
        try:
            value = cfg[name]
            nested = [option for option in alternatives(hint) if is_dataclass(option)]
            if nested and isinstance(value, DictConfig):
                return self._read_group(value, nested[0], f"{key}.")  # type: ignore[arg-type]
            items = [get_args(option)[1] for option in alternatives(hint) if get_origin(option) is dict]
            if isinstance(value, DictConfig) and any(map(is_dataclass, items)):
                return self._read_groups(cfg, value, items[0], key)
            value = convert(value, hint)
            if expected := find_out_of_range(value, annotated):
                self._add_problem(cfg, name, key, f"{key} is {_shorten(str(value))}, expected {expected}")
            return value
        except MissingMandatoryValue:
            self._add_missing(key)
        except OmegaConfBaseException as error:
            reason = _describe_interpolation_error(error)
            self._consequences.setdefault(reason, f"{key}: {reason}")
        except TypeError:
            self._add_problem(cfg, name, key, _describe_wrong_type(cfg, name, hint, key))
        return None

    def _read_groups(self, cfg: DictConfig, groups: DictConfig, schema: Any, key: str) -> dict[str, Any]:
        """Read groups by name; keys that one lacks have the values of the same keys in `cfg`, which contains it."""
        common = OmegaConf.masked_copy(cfg, [field.name for field in fields(schema) if field.name in cfg])
        for name, group in groups.items_ex(resolve=False):
            if isinstance(group, DictConfig):
                groups[name] = OmegaConf.merge(common, group)
        return {str(name): self._read_value(groups, name, schema, schema, f"{key}.{name}") for name in list(groups)}

    def _add_missing(self, key: str) -> None:
        self.missing.append(key)
        self.problems.append(f"missing value: give {key}=...")

    def _add_problem(self, cfg: DictConfig, name: str, key: str, problem: str) -> None:
        if OmegaConf.is_interpolation(cfg, name):
            self._consequences[key] = problem
        else:
            self.problems.append(problem)

    def _count_problems(self) -> int:
        return len(self.problems) + len(self.unknown) + len(self._consequences)

    def _add_undefined(self, cfg: DictConfig, name: str, key: str) -> None:
        """Classify a key that the schema lacks as a key of v1 or as unknown; of a group, each key in it."""
        node = OmegaConf.to_container(cfg, resolve=False).get(name)  # type: ignore[union-attr]
        is_group = isinstance(node, dict) and bool(node)
        has_unsupported = is_group and any(each.startswith(f"{key}.") for each in FIXED)
        value = parse_text(node, (bool, int, float)) if isinstance(node, str) else node  # YAML keeps false as text
        is_default = value is None or (key in FIXED and (not value or str(value) == str(FIXED[key])))
        if key in FIXED and not is_default:
            only = "null" if FIXED[key] is None else FIXED[key]
            shown = _shorten(str(node))
            self.problems.append(f"{key} is {shown}, which is not supported: set it to {only}; {replacement(key)}")
        elif (instead := replacement(key, self._root)) and not has_unsupported:
            if not is_default:  # a default asks for nothing
                self.ignored[key] = instead
        elif is_group:
            for child in node:  # type: ignore[union-attr]
                self._add_undefined(cfg[name], str(child), f"{key}.{child}")
        else:
            self.unknown.append(key)


def find_out_of_range(value: Any, hint: Any) -> str | None:
    """Check a converted value against the ranges in its type; return what is expected instead, or None."""
    for option in alternatives(hint):
        is_annotated = get_origin(option) is Annotated
        limits = option.__metadata__[0] if is_annotated else _DEFAULT_RANGES.get(option)
        plain = option.__origin__ if is_annotated else option
        if limits is not None and type(value) in [get_origin(each) or each for each in alternatives(plain)]:
            return limits.expected(value)
        if isinstance(value, list | dict) and get_origin(plain) is type(value):
            items = value if isinstance(value, list) else value.values()
            found = (find_out_of_range(item, get_args(plain)[-1]) for item in items)
            return next((f"{expected} for each item" for expected in found if expected), None)
    return None


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to a type; text that represents the value is accepted, such as "8" for 8.

    Raises:
        TypeError: if the value does not have this type.
    """
    options = alternatives(hint)
    if isinstance(value, str):
        value = parse_text(value, options)
    if type(value) in options and len(options) > 1 and not isinstance(value, str):
        return value  # in `int | float`, 1 remains a count and 1.0 a fraction
    for option in options:
        try:
            return _convert_to(value, option)
        except TypeError:
            continue
    raise TypeError


def _convert_to(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _parse_any(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
    if hint is type(None) and value is None:
        return None
    if origin is list and isinstance(value, ListConfig):
        return [convert(item, arguments[0]) for item in value]
    if origin is dict and isinstance(value, DictConfig):
        return {str(name): convert(item, arguments[1]) for name, item in value.items()}
    if origin is Literal and value is not None and str(value) in arguments:
        return str(value)
    if isinstance(value, str | int | float) and hint in _SCALARS:
        try:
            return _SCALARS[hint](value)
        except (KeyError, ValueError, OverflowError):
            raise TypeError from None
    raise TypeError


def parse_text(text: str, options: tuple[Any, ...]) -> Any:
    """Convert text to a boolean if that is one of the types `options`, or to a number if text is none of them."""
    if bool in options and text.lower() in _WRITTEN_BOOLS:
        return _WRITTEN_BOOLS[text.lower()]
    if str not in options and (int in options or float in options):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
    return text


def _parse_any(value: Any) -> Any:
    """Convert true, false and numbers as PyYAML writes them (1.0e-05) in values of any type."""
    if isinstance(value, dict):
        return {name: _parse_any(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_parse_any(child) for child in value]
    if isinstance(value, str) and _WRITTEN_FLOAT.fullmatch(value):
        return float(value)
    return _WRITTEN_BOOLS.get(value.lower(), value) if isinstance(value, str) else value


def _to_int(value: str | int | float) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _to_float(value: str | int | float) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _to_str(value: str | int | float) -> str:
    """Expand `~/` and `~user/`, which a shell does not expand after `key=`."""
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~") and "/" in text else text


_SCALARS: dict[Any, Callable[[str | int | float], Any]] = {
    bool: lambda value: _BOOLS[str(value).lower()],
    int: _to_int,
    float: _to_float,
    str: _to_str,
}


def _describe_wrong_type(cfg: DictConfig, name: str, hint: Any, key: str) -> str:
    value = cfg[name]
    shown = repr(redact_tree({name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value})[name])
    shown = "null" if value is None else _shorten(shown)
    choices = [
        str(item) for option in alternatives(hint) if get_origin(option) is Literal for item in get_args(option)
    ]
    return f"{key} is {shown}, expected {describe(hint)}{did_you_mean(str(value), choices)}"


def _describe_interpolation_error(error: OmegaConfBaseException) -> str:
    """Return one line that explains why a `${...}` cannot be resolved."""
    text = str(error.msg or error).splitlines()[0]
    if "Environment variable" in text:
        variable = text.partition("Environment variable '")[2].partition("'")[0]
        return f"environment variable {variable} is not set"
    return text.partition(" raised while resolving interpolation: ")[2] or text


def _shorten(text: str) -> str:
    return text if len(text) < _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
