# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models in other formats, which are the class attributes `nemo` and `hugging_face` of the models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bionemo.config.targets import import_target, is_allowed, known_models


@dataclass(frozen=True, kw_only=True)
class ModelFormat:
    """Description of a model class in another format."""

    # Path of the class of which this is an attribute; Python sets it when the class is created.
    our_class: str = field(init=False, default="")

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "our_class", f"{owner.__module__}.{owner.__qualname__}")


def format_of(config: Mapping[str, Any], attribute: str) -> Any:
    """Return an attribute of the class that `_target_` of our configuration names.

    None if there is none or the class inherits it: a subclass may compute another function.

    Raises:
        UserError: if the class does not exist.
    """
    target = config.get("_target_")
    if not isinstance(target, str) or not is_allowed(target):
        return None
    return vars(import_target(target)).get(attribute)


def known_formats(attribute: str) -> Iterator[Any]:
    """Yield an attribute of all known models that have it; each class is imported when it is reached."""
    found = (format_of({"_target_": name}, attribute) for name in known_models())
    return (each for each in found if each is not None)
