# SPDX-License-Identifier: Apache-2.0
"""Classes that a configuration may name in `_target_`. The name may come from an untrusted file.

A name is accepted if it is

* a class of `bionemo.models` or `bionemo.launch`, or a function `prepare` of `bionemo.preparation`,
* in the entry-point group `bionemo.models` of an installed package:
  `[project.entry-points."bionemo.models"]`, `mine = "mylab.models:Mine"`, or
* in a package listed in the environment variable `BIONEMO_TRUSTED_PACKAGES`, such as `mylab,other.part`.

The name is checked before anything is imported, because importing a module runs its code. The imported object must be
defined under that name: aliases (`mylab.models.os.system`, an imported class) are refused.

The dataclass of a target is the annotation of `config`. Definitions of bionemo are read from their source, so that a
configuration is checked without importing torch.
"""

import ast
import importlib
import importlib.util
import os
import re
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from bionemo.common.errors import UserError
from bionemo.config import schema
from bionemo.config.hints import did_you_mean

ENTRY_POINT_GROUP, TRUSTED_PACKAGES = "bionemo.models", "BIONEMO_TRUSTED_PACKAGES"
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_DIRECTORY = Path(__file__).parents[1]
_PACKAGES = ("models", "launch", "preparation")  # contain classes and functions that a configuration may name
_OWN_NAME = re.compile(rf"bionemo\.({'|'.join(_PACKAGES)})\.([a-z]\w*)\.(\w+)")
T = TypeVar("T")
Definition = ast.ClassDef | ast.FunctionDef


def import_target(name: str) -> Any:
    """Import the class, or the function `prepare` of bionemo, that a configuration names.

    Raises:
        UserError: if the name is not allowed or does not exist.
    """
    module, _, attribute = name.rpartition(".")
    shown = repr(name[:100])
    if not is_allowed(name):
        raise UserError(
            f"cannot import {shown}: it is neither part of bionemo nor allowed by the entry point {ENTRY_POINT_GROUP} "
            f"or by {TRUSTED_PACKAGES}=PACKAGE{_hint(name)}"
        )
    try:
        found = _import_attribute(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {shown}: {error}{_hint(name)}") from error
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if defined != name or not (isinstance(found, type) or _definition(name)):
        raise UserError(f"cannot import {shown}: it is {defined}, expected a class under its own name{_hint(name)}")
    return found


def is_allowed(name: str) -> bool:
    """Return whether a name may be imported, without importing anything."""
    if not _DOTTED_NAME.fullmatch(name):
        return False
    if _definition(name) or name in _entry_points():
        return True
    packages = (package.strip() for package in os.environ.get(TRUSTED_PACKAGES, "").split(","))
    return any(package and name.startswith(f"{package}.") for package in packages)


def known_models() -> list[str]:
    """Return the names of the model classes of bionemo, with their base classes, and of installed packages."""
    own = [name for name in _own_targets() if name.startswith("bionemo.models.")]
    return [*own, *_entry_points()]


def target_schema(target: str, expected: type[T]) -> type[T]:
    """Return the dataclass of a `_target_`: the type of its attribute or constructor argument `config`.

    Raises:
        UserError: if the class cannot be imported, or its dataclass is not a subclass of `expected`.
    """
    definition = _definition(target)
    found = getattr(schema, _annotation(definition), None) if definition else None
    if found is None:
        found = _annotated_type(import_target(target))
    if not (isinstance(found, type) and is_dataclass(found)):
        raise UserError(f"{target} has no attribute `config` annotated with a dataclass")
    if not issubclass(found, expected):
        raise UserError(f"{target} takes a {found.__name__}, expected a {expected.__name__}")
    return found


def _annotated_type(target: Any) -> Any:
    """Return the type of `config` as annotated in a class body; a more specific one of the constructor wins."""
    declared = get_type_hints(target).get("config")
    argument = get_type_hints(target.__init__).get("config")
    if declared is None or (isinstance(argument, type) and issubclass(argument, declared)):
        return argument
    return declared


def _import_attribute(module: str, attribute: str) -> Any:
    spec = importlib.util.find_spec(module)
    if spec and spec.origin and spec.origin.endswith(".py") and attribute not in Path(spec.origin).read_text("utf-8"):
        raise AttributeError(f"{module} has no '{attribute}'")  # detected without importing torch
    return getattr(importlib.import_module(module), attribute)


def _entry_points() -> list[str]:
    from importlib.metadata import entry_points  # 10 ms, for models outside this package only

    return [entry.value.replace(":", ".") for entry in entry_points(group=ENTRY_POINT_GROUP)]


def _hint(name: str) -> str:
    return did_you_mean(name[:100], _own_targets())


def _own_targets() -> list[str]:
    """Return the names of the classes and functions of bionemo that take a configuration."""
    return [
        f"bionemo.{package}.{path.stem}.{name}"
        for package in _PACKAGES
        for path in sorted((_DIRECTORY / package).glob("[a-z]*.py"))
        for name, definition in _definitions(path).items()
        if _annotation(definition)
    ]


def _definition(name: str) -> Definition | None:
    """Return the source of a class of bionemo, or of a function `prepare`; None for all other names."""
    match = _OWN_NAME.fullmatch(name)
    path = _DIRECTORY / match[1] / f"{match[2]}.py" if match else None
    return _definitions(path).get(match[3]) if match and path and path.is_file() else None


@cache
def _definitions(path: Path) -> dict[str, Definition]:
    """Return the classes, and the function `prepare`, that a source file defines."""
    nodes = ast.parse(path.read_text("utf-8")).body
    classes: dict[str, Definition] = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    return classes | {n.name: n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "prepare"}


def _annotation(definition: Definition) -> str:
    """Return the name of the annotation of `config`, or of the argument of a function; "" if there is none."""
    arguments: list[ast.arg] = []
    if isinstance(definition, ast.FunctionDef):
        arguments = definition.args.args[:1]
    else:
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "config":
                return ast.unparse(node.annotation)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = [argument for argument in node.args.args if argument.arg == "config"]
    return ast.unparse(arguments[0].annotation) if arguments and arguments[0].annotation else ""
