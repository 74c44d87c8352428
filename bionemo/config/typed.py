# SPDX-License-Identifier: Apache-2.0
"""A composed config becomes the dataclasses of `schema`; everything wrong with it is collected on the way.

OmegaConf's structured configs know neither Literal nor unions with lists, and stop at the first mistake; hence this.
"""

from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree
from bionemo.config.explain import explain_interpolation
from bionemo.config.hints import all_keys, alternatives, describe, did_you_mean
from bionemo.config.legacy import OF_PREDICTIONS, replacement
from bionemo.config.legacy_downstream import OF_DOWNSTREAM
from bionemo.config.schema import SCHEMAS, DownstreamConfig, InferConfig, PreparationConfig
from bionemo.config.schema.ranges import ANY_FLOAT, ANY_INT
from bionemo.config.targets import resolve

T = TypeVar("T")
_OF_KIND: dict[type, dict[str, str]] = {InferConfig: OF_PREDICTIONS, DownstreamConfig: OF_DOWNSTREAM}
_LIMITS = {int: ANY_INT, float: ANY_FLOAT}  # of numbers without a range of their own
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Reader:
    """Reads a config once.

    Attributes:
        problems: what has to be mended, one phrase each.
        legacy: keys of v1 that were given and have no effect -> what replaced them.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.legacy: dict[str, str] = {}
        self._unknown: list[str] = []
        self._of_kind: dict[str, str] = {}
        self._consequences: dict[str, str] = {}  # why a value that repeats others has none -> the first such problem

    def read(self, cfg: DictConfig, schema: type[T]) -> T | None:
        """Give the typed config, or None when there are problems."""
        self._of_kind = _OF_KIND.get(schema, {})
        result = self._group(cfg, schema, "")
        if self._unknown:
            keys = [*all_keys(_schema(cfg, schema)), *_model_keys(cfg)]
            self.problems[:0] = [f"unknown key {key}{did_you_mean(key, keys)}" for key in self._unknown]
        self.problems = list(dict.fromkeys(self.problems or self._consequences.values()))
        return None if self.problems else result

    def _group(self, cfg: DictConfig, schema: type[T], prefix: str) -> T | None:
        """Read a node; its `_target_`, where it has one, chooses the dataclass."""
        before = self._count()
        try:
            schema = target_schema(str(cfg["_target_"]), schema) if "_target_" in cfg else schema
        except UserError as error:
            self.problems.append(f"{prefix}_target_: {error}")
            return None
        hints, ranges = get_type_hints(schema), get_type_hints(schema, include_extras=True)
        if "kind" in hints and cfg.get("kind") not in (
            *get_args(hints["kind"]),
            None,
        ):  # nothing else would fit either
            wanted = " or ".join(get_args(hints["kind"]))
            self.problems.append(f"{prefix[:-1]} is of the kind {cfg['kind']}, but {wanted} is needed: choose another")
            return None
        for name in map(str, cfg):
            if name not in hints:
                self._strange(cfg, name, f"{prefix}{name}")
        values = {}
        for field in fields(schema):  # type: ignore[arg-type]
            key = f"{prefix}{field.name}"
            if field.name in list(cfg):  # `in cfg` would deny a key whose value is missing
                values[field.name] = self._value(cfg, field.name, hints[field.name], ranges[field.name], key)
            elif field.default is MISSING and field.default_factory is MISSING:
                self.problems.append(_missing(key))
        return schema(**values) if before == self._count() else None

    def _value(self, cfg: DictConfig, name: str, hint: Any, ranges: Any, key: str) -> Any:
        try:
            value = cfg[name]
            nested = [option for option in alternatives(hint) if is_dataclass(option)]
            if nested and isinstance(value, DictConfig):
                return self._group(value, nested[0], f"{key}.")  # type: ignore[arg-type]
            value = convert(value, hint)
            if expected := out_of_range(value, ranges):
                self._report(cfg, name, key, f"{key} is {_short(str(value))}, expected {expected}")
            return value
        except MissingMandatoryValue:
            self.problems.append(_missing(key))
        except OmegaConfBaseException as error:
            why = explain_interpolation(error)
            self._consequences.setdefault(why, f"{key}: {why}")
        except TypeError:
            self._report(cfg, name, key, _wrong(cfg, name, hint, key))
        return None

    def _report(self, cfg: DictConfig, name: str, key: str, problem: str) -> None:
        """Note a wrong value; one that repeats another counts only when that is right."""
        if OmegaConf.is_interpolation(cfg, name):
            self._consequences[key] = problem
        else:
            self.problems.append(problem)

    def _count(self) -> int:
        return len(self.problems) + len(self._unknown) + len(self._consequences)

    def _strange(self, cfg: DictConfig, name: str, key: str) -> None:
        """Sort a key that the schema lacks into known to v1 and unknown to all, down to the key that was typed."""
        node = OmegaConf.to_container(cfg, resolve=False).get(name)  # type: ignore[union-attr]
        if instead := replacement(key, self._of_kind):
            self.legacy[key] = instead
        elif isinstance(node, dict) and node:
            for below in node:
                self._strange(cfg[name], str(below), f"{key}.{below}")
        else:
            self._unknown.append(key)


def out_of_range(value: Any, hint: Any) -> str | None:
    """What a converted value should be, by the ranges in its type; None if it is right."""
    for option in alternatives(hint):
        limits = option.__metadata__[0] if get_origin(option) is Annotated else _LIMITS.get(option)
        plain = option.__origin__ if get_origin(option) is Annotated else option
        if limits is not None and type(value) in map(lambda each: get_origin(each) or each, alternatives(plain)):
            return limits.expected(value)
        if isinstance(value, list | dict) and get_origin(plain) is type(value):
            items, hint_of_items = (value, 0) if isinstance(value, list) else (value.values(), 1)
            found = (out_of_range(item, get_args(plain)[hint_of_items]) for item in items)
            return next((f"{expected} in each place" for expected in found if expected), None)
    return None


def convert(value: Any, hint: Any) -> Any:
    """Give the value as the type it is wanted in.

    Raises:
        TypeError: when it is not of that type and does not plainly say it, as "8" says 8.
    """
    options = alternatives(hint)
    if len(options) == 1:
        return _convert(value, hint)
    if type(value) in options and not isinstance(value, str):  # so that 1 stays a number of batches and 1.0 a share
        return value
    for option in options:
        try:
            return _convert(value, option)
        except TypeError:
            continue
    raise TypeError


def _convert(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if hint is type(None) and value is None:
        return None
    if origin is list and isinstance(value, ListConfig):
        return [convert(item, arguments[0]) for item in value]
    if origin is dict and isinstance(value, DictConfig):
        return {str(name): convert(item, arguments[1]) for name, item in value.items()}
    if origin is Literal:
        found = [option for option in arguments if option == str(value)]
        if found and value is not None:
            return found[0]
    elif isinstance(value, str | int | float) and hint in _SCALARS:
        return _SCALARS[hint](value)
    raise TypeError


def _to_bool(value: str | int | float) -> bool:
    if str(value).lower() not in _TRUTH:
        raise TypeError
    return _TRUTH[str(value).lower()]


def _to_int(value: str | int | float) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError
    try:
        return int(value)
    except ValueError:
        raise TypeError from None


def _to_float(value: str | int | float) -> float:
    if isinstance(value, bool):
        raise TypeError
    try:
        return float(value)
    except ValueError:
        raise TypeError from None


_SCALARS: dict[Any, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: str}


def target_schema(target: str, expected: type[T]) -> type[T]:
    """The dataclass behind a `_target_`: the table's, else the type of its constructor's `config` argument.

    Raises:
        UserError: when the class cannot be found, or its config is not one of those expected.
    """
    schema = SCHEMAS.get(target) or get_type_hints(resolve(target).__init__).get("config")
    if not (isinstance(schema, type) and is_dataclass(schema)):
        raise UserError(f"{target} has no constructor argument `config` that is typed as a dataclass")
    if not issubclass(schema, expected):
        raise UserError(f"{target} wants a {schema.__name__}, which is no {expected.__name__}")
    return schema


def _model_keys(cfg: DictConfig) -> list[str]:
    """Full keys of the model and of the preparation of its data."""
    if "model" not in cfg:
        return []
    model = cfg.get("model")
    keys = [f"model.{key}" for key in all_keys(_schema(model, next(iter(SCHEMAS.values()))))]
    preparation = OmegaConf.select(cfg, "model.data.preprocessing")
    below = all_keys(_schema(preparation, PreparationConfig)) if isinstance(preparation, DictConfig) else ()
    return keys + [f"model.data.preprocessing.{key}" for key in below]


def _schema(node: DictConfig, otherwise: type) -> type:
    try:
        return target_schema(node["_target_"], object)
    except Exception:  # only for a hint
        return otherwise


def _missing(key: str) -> str:
    return f"missing value: give {key}=..."


def _wrong(cfg: DictConfig, name: str, hint: Any, key: str) -> str:
    value = cfg[name]
    shown = repr(redact_tree({name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value})[name])
    words = [str(word) for option in alternatives(hint) if get_origin(option) is Literal for word in get_args(option)]
    shown = "null" if value is None else _short(shown)
    return f"{key} is {shown}, expected {describe(hint)}{did_you_mean(str(value), words)}"


def _short(text: str) -> str:
    return text if len(text) < 80 else text[:77] + "..."
