# SPDX-License-Identifier: Apache-2.0
"""Description of a transformers architecture, and the translation between its config.json and our configuration."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.formats.model_formats import ModelFormat
from bionemo.formats.shape_check import MAX_LAYERS, MAX_SIZE, get_size
from bionemo.formats.weight_names import MULTIPLE, WeightNames

Settings = Mapping[str, Any]  # content of config.json
Config = Mapping[str, Any]  # `model` section of our configuration


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelFormat):
    """A model class in the format of transformers."""

    title: str  # name for messages
    model_type: str  # in config.json, as class_name
    class_name: str
    other_types: Collection[str] = ()  # `model_type` of other forms, which are read only
    names: WeightNames
    prefix: str  # prefix of weight names; files of the model without a head omit it
    required: Settings  # keys of config.json that may only have one value, which is also their default
    sizes: Mapping[str, str]  # positive integers: our key -> key of config.json
    numbers: Mapping[str, tuple[str, float]]  # numbers >= 0: our key -> (key of config.json, default)
    flags: Mapping[str, str] = field(default_factory=dict)  # booleans, default false: our key -> key of config.json
    # Checks config.json and returns the remaining keys of our configuration, given the others.
    read_settings: Callable[[Settings, Config], dict[str, Any]]
    # Checks our configuration and returns the other keys of config.json; the second argument is the vocabulary size.
    write_settings: Callable[[Config, int], dict[str, Any]]
    write_tokenizer: Callable[[Config], dict[str, str]]  # returns the texts of the tokenizer's files, by file name
    read_tokenizer: Callable[[Path], dict[str, Any]]  # returns the keys that follow from the tokenizer's files
    recognizes: Callable[[Settings], bool] = lambda settings: True  # distinguishes architectures of one model_type
    position_type: str = ""  # `position_embedding_type` that distinguishes architectures of one model_type
    ignored: Sequence[str] = ()  # patterns of the names of tensors that are computed or unused
    # Name of the rotary frequencies of layer `{}`, which some versions of transformers expect.
    inverse_frequencies: str = ""
    # Returns those of names.copies that transformers need in the file, given our configuration.
    written_copies: Callable[[Config], Sequence[str]] = lambda config: ()
    # Weights that our models lack: name -> dimensions, numbers or keys of our configuration. They are written and must
    # be 0.
    zeros: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    other_names: Sequence[WeightNames] = ()  # of other forms, which are read only
    # Returns config.json with the keys of the form that is written, given one of any form.
    update_settings: Callable[[Settings], Settings] = dict
    contact_head: str = ""  # name of the contact regression, which the class in transformers has

    def to_config(self, settings: Settings) -> tuple[dict[str, Any], int]:
        """Translate config.json to our configuration and the vocabulary size.

        Raises:
            UserError: if a value is not supported; names its key.
        """
        for key, value in self.required.items():
            found = settings.get(key, value)
            unset = found is None and value is False
            if not unset and (found != value or isinstance(found, bool) != isinstance(value, bool)):
                raise UserError(f"{key} in its config.json is {str(found)[:50]!r}; only {value} is supported")
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
                raise UserError(f"{theirs} in its config.json is {value!r}, not a number from 0 on")
        for ours, theirs in self.flags.items():
            value = settings.get(theirs)
            if value is not None and type(value) is not bool:
                raise UserError(f"{theirs} in its config.json is {str(value)[:50]!r}, neither true nor false")
            config[ours] = bool(value)
        config[MULTIPLE] = get_size({MULTIPLE: 128, **settings}, MULTIPLE)
        config |= self.read_settings(settings, config)
        config["seq_length"] = config["encoder_seq_length"] = config["max_position_embeddings"]
        return config, get_size(settings, "vocab_size")

    def to_settings(self, config: Config, vocab_size: int) -> dict[str, Any]:
        """Translate our configuration and the vocabulary size to config.json.

        Raises:
            UserError: if transformers have no model of this configuration.
        """
        hidden, heads = get_size(config, "hidden_size"), get_size(config, "num_attention_heads")
        if config.get("kv_channels") not in (None, hidden // heads) or hidden % heads:
            size = config.get("kv_channels")
            raise UserError(f"its head size is {size}; that of {self.title} is hidden_size / num_attention_heads")
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "vocab_size": vocab_size,
            MULTIPLE: get_size(config, MULTIPLE),  # not used by transformers; restores our padding when read again
            **{theirs: config[ours] for ours, theirs in self.sizes.items()},
            **{theirs: bool(config.get(ours, True)) for ours, theirs in self.flags.items()},
            **{theirs: config.get(ours, default) for ours, (theirs, default) in self.numbers.items()},
            **self.write_settings(config, vocab_size),
            **self.required,
        }
