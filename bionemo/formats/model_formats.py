# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models in other formats: the class attributes `nemo`, `nemo2` and `hugging_face` of the models."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bionemo.common.errors import UserError
from bionemo.config.targets import import_target, is_allowed, known_models
from bionemo.formats.shape_check import MAX_LAYERS, MAX_SIZE, get_size
from bionemo.formats.weight_names import MULTIPLE

Settings = Mapping[str, Any]  # of another format
Config = Mapping[str, Any]  # `model` section of our configuration


@dataclass(frozen=True, kw_only=True)
class ModelFormat:
    """Description of a model class in another format."""

    # Path of the class of which this is an attribute; Python sets it when the class is created.
    our_class: str = field(init=False, default="")

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "our_class", f"{owner.__module__}.{owner.__qualname__}")


@dataclass(frozen=True, kw_only=True)
class SettingsFormat(ModelFormat):
    """Description of a model class in a format with settings of its own."""

    file: ClassVar[str]  # file of the settings, for messages
    required: Settings  # keys that may only have one value, which is also their default
    sizes: Mapping[str, str]  # positive integers: our key -> their key
    numbers: Mapping[str, tuple[str, float]]  # numbers >= 0: our key -> (their key, default)
    flags: Mapping[str, str] = field(default_factory=dict)  # booleans, default false: our key -> their key
    # Checks the settings and returns the remaining keys of our configuration, given the others.
    read_settings: Callable[[Settings, Config], dict[str, Any]]

    def to_config(self, settings: Settings) -> tuple[dict[str, Any], int]:
        """Translate settings to our configuration and the vocabulary size.

        Raises:
            UserError: if a value is not supported; names its key.
        """
        for key, value in self.required.items():
            found = settings.get(key, value)
            unset = found is None and value is False
            if not unset and (found != value or isinstance(found, bool) != isinstance(value, bool)):
                raise UserError(f"{key} in its {self.file} is {str(found)[:100]!r}; only {value} is supported")
        config: dict[str, Any] = {"_target_": self.our_class, "kv_channels": None}
        for ours, theirs in self.sizes.items():
            config[ours] = get_size(settings, theirs, MAX_LAYERS if ours == "num_layers" else MAX_SIZE)
        hidden, heads = self.sizes["hidden_size"], self.sizes["num_attention_heads"]
        if settings[hidden] % settings[heads]:
            raise UserError(f"{hidden} {settings[hidden]} is not divisible by {heads} {settings[heads]}")
        for ours, (theirs, default) in self.numbers.items():
            config[ours] = settings.get(theirs, default)
            if type(config[ours]) not in (int, float) or not 0 <= config[ours] < math.inf:
                value = str(config[ours])[:50]
                raise UserError(f"{theirs} in its {self.file} is {value!r}, not a number from 0 on")
        for ours, theirs in self.flags.items():
            value = settings.get(theirs)
            if value is not None and type(value) is not bool:
                raise UserError(f"{theirs} in its {self.file} is {str(value)[:50]!r}, neither true nor false")
            config[ours] = bool(value)
        config[MULTIPLE] = get_size({MULTIPLE: 128, **settings}, MULTIPLE)
        config |= self.read_settings(settings, config)
        config["seq_length"] = config["encoder_seq_length"] = config["max_position_embeddings"]
        return config, get_size(settings, "vocab_size")


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
