# SPDX-License-Identifier: Apache-2.0
"""Description of a transformers architecture, and the translation of our configuration to its config.json."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bionemo.common.errors import UserError
from bionemo.formats.model_formats import Config, Settings, SettingsFormat
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import MULTIPLE, WeightNames


@dataclass(frozen=True, kw_only=True)
class Architecture(SettingsFormat):
    """A model class in the format of transformers, whose settings are the content of config.json."""

    file: ClassVar[str] = "config.json"
    title: str  # name for messages
    model_type: str  # in config.json, as class_name
    class_name: str
    other_types: Collection[str] = ()  # `model_type` of other forms, which are read only
    names: WeightNames
    prefix: str  # prefix of weight names; files of the model without a head omit it
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
