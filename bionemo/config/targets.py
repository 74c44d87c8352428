# SPDX-License-Identifier: Apache-2.0
"""Classes that a configuration may name in `_target_`. The name may come from an untrusted file.

A name is accepted if it is

* a key of the table `SCHEMAS` (the classes of bionemo),
* in the entry-point group `bionemo.models` of an installed package:
  `[project.entry-points."bionemo.models"]`, `mine = "mylab.models:Mine"`, or
* in a package listed in the environment variable `BIONEMO_TRUSTED_PACKAGES`, such as `mylab,other.part`.

The name is checked before anything is imported, because importing a module runs its code. The imported object must be
defined under that name: aliases (`mylab.models.os.system`, an imported class) are refused.
"""

import importlib
import importlib.util
import os
import re
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from bionemo.common.errors import UserError
from bionemo.config.hints import did_you_mean
from bionemo.config.schema import SCHEMAS

ENTRY_POINT_GROUP, TRUSTED_PACKAGES = "bionemo.models", "BIONEMO_TRUSTED_PACKAGES"
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_RENAMED = {  # names in configurations of earlier versions
    "bionemo.launching.local.Local": "bionemo.launch.local.Local",
    "bionemo.launching.mpi.Mpi": "bionemo.launch.mpi.Mpi",
    "bionemo.launching.slurm.Slurm": "bionemo.launch.slurm.Slurm",
    "bionemo.launching.bcp.Bcp": "bionemo.launch.bcp.Bcp",
    "bionemo.launching.ray.Ray": "bionemo.launch.ray.Ray",
    "bionemo.megatron.corpus.prepare": "bionemo.preparation.megatron_corpus.prepare",
}
T = TypeVar("T")


def import_target(name: str) -> Any:
    """Import the class, or the function listed in `SCHEMAS`, that a configuration names.

    Raises:
        UserError: if the name is not allowed or does not exist.
    """
    name = _RENAMED.get(name, name)
    module, _, attribute = name.rpartition(".")
    shown, hint = repr(name[:100]), did_you_mean(name[:100], SCHEMAS)
    if not is_allowed(name):
        raise UserError(
            f"cannot import {shown}: it is neither part of bionemo nor in a package of {TRUSTED_PACKAGES}{hint}"
        )
    try:
        found = _import_attribute(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {shown}: {error}{hint}") from error
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if defined != name or not (isinstance(found, type) or name in SCHEMAS):
        raise UserError(f"cannot import {shown}: it is {defined}, expected a class under its own name{hint}")
    return found


def is_allowed(name: str) -> bool:
    """Return whether a name may be imported, without importing anything."""
    if not _DOTTED_NAME.fullmatch(name):
        return False
    if (
        name in SCHEMAS
        or name in _RENAMED
        or any(entry.value.replace(":", ".") == name for entry in entry_points(group=ENTRY_POINT_GROUP))
    ):
        return True
    packages = (package.strip() for package in os.environ.get(TRUSTED_PACKAGES, "").split(","))
    return any(package and name.startswith(f"{package}.") for package in packages)


def _import_attribute(module: str, attribute: str) -> Any:
    spec = importlib.util.find_spec(module)
    if spec and spec.origin and spec.origin.endswith(".py") and attribute not in Path(spec.origin).read_text("utf-8"):
        raise AttributeError(f"{module} has no '{attribute}'")  # detected without importing torch
    return getattr(importlib.import_module(module), attribute)


def target_schema(target: str, expected: type[T]) -> type[T]:
    """Return the dataclass of a `_target_`: from `SCHEMAS`, else the type of its constructor's argument `config`.

    Raises:
        UserError: if the class cannot be imported, or its dataclass is not a subclass of `expected`.
    """
    schema = SCHEMAS.get(_RENAMED.get(target, target)) or get_type_hints(import_target(target).__init__).get("config")
    if not (isinstance(schema, type) and is_dataclass(schema)):
        raise UserError(f"{target} has no constructor argument `config` annotated with a dataclass")
    if not issubclass(schema, expected):
        raise UserError(f"{target} takes a {schema.__name__}, expected a {expected.__name__}")
    return schema
