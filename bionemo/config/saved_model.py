# SPDX-License-Identifier: Apache-2.0
"""The `model` section of the configuration of a saved model, outside a run."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf, open_dict

from bionemo.common.errors import UserError
from bionemo.config.compose import compose
from bionemo.config.paths import find_source
from bionemo.config.schema import ModelConfig
from bionemo.config.schema_reader import SchemaReader
from bionemo.config.targets import target_schema
from bionemo.config.text_values import escape_interpolations

# Keys of `model` that do not change the outputs that the model computes with given weights. A key includes all keys
# below it. All other keys, including those of new models, may change the outputs.
TRAINING_KEYS = (  # they affect only training
    "micro_batch_size", "replica_batch_size", "global_batch_size", "hidden_dropout", "attention_dropout", "seed",
    "optim",
    "data.modify_percent", "data.mask_percent", "data.perturb_percent", "data.identity_percent",
    "data.mask_special_tokens", "data.seq_length_dec", "data.masked_lm_prob",
    "data.encoder_augment", "data.canonicalize_encoder_input", "data.decoder_independent_augment",
    "data.canonicalize_decoder_output", "data.encoder_mask", "data.decoder_mask", "data.mask_prob",
    "data.span_lambda", "data.dynamic_padding", "data.drop_last", "data.long_sequences",
)  # fmt: skip
_OTHER_KEYS = (
    "_target_", "name", "init_method_std",
    # checked elsewhere: class and tokens by `Trainable.identity`, sizes by the shapes of the weights, the order of
    # the data by data/data_module.py
    "tokenizer", "make_vocab_size_divisible_by", "seq_length", "encoder_seq_length", "max_position_embeddings", "data",
    # parallel layout and speed
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "compile",
    "native_amp_init_scale", "native_amp_growth_interval", "hysteresis", "activations_checkpoint_granularity",
    "activations_checkpoint_method", "activations_checkpoint_num_layers",
    # start of a run, and tasks beside the training
    "resume_from_checkpoint", "restore_encoder_path", "validation", "dwnstr_task_validation", "drop_last",
)  # fmt: skip
_MAX_REPORTED = 3  # problems in one error message


@dataclass(kw_only=True)
class _Section:
    model: ModelConfig


def affects_outputs(key: str) -> bool:
    """Return whether a key of `model` may change the outputs that the model computes with given weights."""
    return not includes_key(TRAINING_KEYS + _OTHER_KEYS, key)


def includes_key(keys: Iterable[str], key: str) -> bool:
    """Return whether a key, or a group that contains it, is among `keys`."""
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def is_complete(section: Mapping[str, Any]) -> bool:
    """Return whether this package wrote a `model` section; those of BioNeMo v1 and NeMo lack keys of ours."""
    data = section.get("data")
    return isinstance(data, Mapping) and ("kind" in data or "packing" in data)


def complete_model_section(default_config: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a file in conf/model as plain values, with those of `values` whose keys it has."""
    composed, _ = compose(find_source("pretrain"), ["name=saved", f"model={default_config}"])
    keys = set(map(str, composed.model))  # `in composed.model` would be False for a key without a default
    with open_dict(composed):
        composed.merge_with({"model": {key: escape_interpolations(values[key]) for key in keys & values.keys()}})
    section: dict[str, Any] = OmegaConf.to_container(composed.model, resolve=True)  # type: ignore[assignment]
    return section


def read_model_section(section: Mapping[str, Any]) -> ModelConfig:
    """Convert a section of plain values to the dataclass of its `_target_`; interpolations in it are not evaluated.

    Keys of another version of bionemo do no harm: later ones have a default in the dataclass, and removed ones are in
    the table of ignored keys.

    Raises:
        UserError: if values are invalid, or keys are missing or unknown; names the first ones.
    """
    reader = SchemaReader()
    if (found := reader.read(OmegaConf.create({"model": escape_interpolations(section)}), _Section)) is not None:
        return found.model
    package, _, _ = str(section["_target_"]).partition(".")
    remedy = f" (use the version of {package} that wrote it)" if reader.missing or reader.unknown else ""
    if reader.missing and package != "bionemo":
        remedy += f", or give a new key a default in the dataclass of {section['_target_']}"
    raise UserError("; ".join(reader.problems[:_MAX_REPORTED]) + remedy)


def add_defaults(section: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Return a section of plain values with the defaults that the dataclass of a model class has for missing keys.

    Raises:
        UserError: if the class cannot be imported.
    """
    keys = fields(target_schema(target, ModelConfig))
    defaults = {each.name: each.default for each in keys if each.default is not MISSING}
    for each in keys:
        if each.default_factory is not MISSING:
            value = each.default_factory()
            defaults[each.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return defaults | dict(section)
