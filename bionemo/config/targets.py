# SPDX-License-Identifier: Apache-2.0
"""Which classes a configuration may name. A `_target_` is text from anywhere, and importing a module runs it.

Three doors, each opened on purpose:

* the table `SCHEMAS`: what bionemo itself has;
* the entry-point group `bionemo.models` of installed packages, for those that ship models:
  `[project.entry-points."bionemo.models"]`, `mine = "mylab.models:Mine"`;
* the environment variable `BIONEMO_TRUSTED_PACKAGES`, for one's own code: `mylab,other.part` lets every class through
  that is defined in these packages or below them.

A name is decided upon before anything is imported, and what is found must be the very thing that was defined under
that name: an alias (`mylab.models.os.system`, an imported class) is refused.
"""

import importlib
import importlib.util
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.hints import did_you_mean
from bionemo.config.schema import SCHEMAS

GROUP, VARIABLE = "bionemo.models", "BIONEMO_TRUSTED_PACKAGES"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def resolve(name: str) -> Any:
    """Import the class, or in `SCHEMAS` the function, that a configuration names.

    Raises:
        UserError: when it is not one of those allowed, or there is none.
    """
    module, _, attribute = name.rpartition(".")
    shown, hint = repr(name[:100]), did_you_mean(name[:100], SCHEMAS)
    if not is_allowed(name):
        raise UserError(f"cannot import {shown}: it is neither bionemo's nor in a package of {VARIABLE}{hint}")
    try:
        found = _found(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {shown}: {error}{hint}") from error
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if defined != name or not (isinstance(found, type) or name in SCHEMAS):
        raise UserError(f"{shown} is {defined}: only a class under its own name is taken{hint}")
    return found


def is_allowed(name: str) -> bool:
    """Whether a name may be imported; nothing is."""
    if not _DOTTED.fullmatch(name):
        return False
    if name in SCHEMAS or any(entry.value.replace(":", ".") == name for entry in entry_points(group=GROUP)):
        return True
    packages = (package.strip() for package in os.environ.get(VARIABLE, "").split(","))
    return any(package and name.startswith(f"{package}.") for package in packages)


def _found(module: str, attribute: str) -> Any:
    spec = importlib.util.find_spec(module)
    if spec and spec.origin and spec.origin.endswith(".py") and attribute not in Path(spec.origin).read_text("utf-8"):
        raise AttributeError(f"{module} has no '{attribute}'")  # told without importing torch for it
    return getattr(importlib.import_module(module), attribute)
