# SPDX-License-Identifier: Apache-2.0
"""Load a trained model of any format onto one device."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from bionemo.common.errors import UserError
from bionemo.config.saved_model import affects_outputs, complete_model_section, is_complete, read_model_section
from bionemo.config.schema import ModelConfig
from bionemo.formats.convert import Model, open_model
from bionemo.formats.detect import locate_model
from bionemo.formats.shape_check import quote_error
from bionemo.inference.model import TrainedModel
from bionemo.megatron.gpu import use_gpu
from bionemo.megatron.sharded_state_dict import check_weight_shapes, load_weights
from bionemo.megatron.sharding import materialize, parameter_shards
from bionemo.models.language_model import LanguageModel, load_model_class, remove_missing_head
from bionemo.tokenizers import Vocabulary, load_tokenizer

# Keys of a saved configuration that depend on where the model ran or that only pretraining reads, and their values
# here. All other keys keep their saved values.
_REPLACED: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False,
    "global_batch_size": None, "compile": False,
    "activations_checkpoint_granularity": None, "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
    "resume_from_checkpoint": None, "restore_encoder_path": None, "dwnstr_task_validation.enabled": False,
    "data.dataset_path": None, "data.index_mapping_dir": None, "data.preprocessing": None,
}  # fmt: skip
# Other formats have a configuration of their own, which `formats` translates to these keys of ours. The others are the
# defaults of the model class.
_CONVERTED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "activation",
    "layernorm_epsilon", "make_vocab_size_divisible_by", "seq_length", "encoder_seq_length",
    "max_position_embeddings", "embedding_token_dropout", "embedding_layer_norm",
    "share_decoder_tokens_head_embeddings", "rotary_frequencies",
)  # fmt: skip
_CONVERTED_TOKENIZER = ("vocab_file", "merge_file", "num_sentinel_tokens")
LENGTHS = ("seq_length", "encoder_seq_length", "max_position_embeddings")
_LENGTHS_OF_DATA = (
    "data.max_seq_length", "data.train.max_seq_length", "data.val.max_seq_length", "data.test.max_seq_length",
)  # fmt: skip


def load(
    path: str | Path, device: str | None = None, precision: str = "32", max_length: int | None = None
) -> TrainedModel:  # fmt: skip
    """Load a trained model onto one device; it may have been trained with any parallel layout.

    Args:
        path: a checkpoint, RUN (the newest checkpoint of a run), RUN:best, `.nemo` archive, directory of Hugging Face
            or BioNeMo 2, LoRA adapter of peft, which is merged into its base, `.pt` file of fair-esm, or
            hf://ORG/NAME or hf://ORG/NAME@REVISION of the Hugging Face hub.
        device: device such as `cpu` or `cuda:1`; None: the first GPU if there is one, else the CPU.
        precision: `32`, `bf16-mixed` or `16-mixed`, as in training.
        max_length: maximum number of tokens of a sequence, with begin and end tokens. It may exceed the length in
            training if the model has rotary positions. None: the length in training.

    Raises:
        UserError: if the model does not exist, cannot be downloaded, is damaged, or cannot be used on this machine.
    """
    if device is None:
        device = "cuda" if use_gpu("auto") else "cpu"
    path, saved = open_saved_model(path)
    network = build_network(saved, path, max_length)
    return load_network(network, saved, path, device, precision)


def load_network(network: LanguageModel, saved: Model, path: Path, device: str, precision: str) -> TrainedModel:
    """Load the weights of a saved model into the network that `build_network` has built from it; see `load`."""
    remove_missing_head(network, saved.weights)
    # before the memory for the configured sizes is allocated
    check_weight_shapes(parameter_shards(network), saved.weights)
    materialize(network, torch.device(device))
    load_weights(parameter_shards(network), saved.weights)
    model = TrainedModel(network.eval().requires_grad_(False), path, precision, saved.contact_head)
    model.convert_weights()
    return model


def open_saved_model(path: str | Path) -> tuple[Path, Model]:
    """Open the checkpoint, archive or directory at a path.

    Raises:
        UserError: if it does not exist or is damaged.
    """
    path = locate_model(path)
    return path, open_model(path)


def build_network(saved: Model, path: Path, max_length: int | None = None) -> LanguageModel:
    """Build the network of a saved model on the meta device; see `load`.

    Raises:
        UserError: if its class is unknown, its vocabulary is missing, or it cannot read sequences of this length.
    """
    network_class = load_model_class(str(saved.config["_target_"]))
    config = read_config(network_class, saved.config, path, max_length)
    vocabulary = read_vocabulary(network_class, config, saved, path)
    try:
        with torch.device("meta"):
            return network_class(config, vocabulary)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: invalid model configuration: {quote_error(error)}") from error


def read_vocabulary(network_class: type[LanguageModel], config: ModelConfig, saved: Model, path: Path) -> Vocabulary:
    """Return the vocabulary of a saved model.

    Raises:
        UserError: if its files are missing, or it is not that of the saved model.
    """
    vocabulary = load_tokenizer(network_class.tokenizer, config.tokenizer)
    if saved.vocabulary and vocabulary.tokens and saved.vocabulary != vocabulary.identity:
        raise UserError(
            f"{path} was trained with another vocabulary than that of {config._target_}: "
            f"{vocabulary.describe_difference(saved.vocabulary)}: provide the class, or the files, of its training"
        )
    if saved.vocab_size is not None and vocabulary.vocab_size != saved.vocab_size:
        raise UserError(
            f"{path} has a vocabulary of {saved.vocab_size:,} tokens, but the tokenizer has "
            f"{vocabulary.vocab_size:,}: provide the vocabulary files of its training"
        )
    return vocabulary


def read_config(
    network_class: type[LanguageModel], saved: Mapping[str, Any], path: Path, max_length: int | None = None
) -> ModelConfig:
    """Return the configuration of a saved model for use on one device; see `load`.

    `saved` is the `model` section of a checkpoint, or what `formats` translates from another format.

    Raises:
        UserError: if the configuration is invalid, or the model cannot read sequences of this length.
    """
    section = _complete_section(network_class, saved, path)
    config = _typed(section, path)
    if max_length is None or max_length <= config.max_position_embeddings:
        return config
    if not network_class.rotary:
        raise UserError(
            f"{path} has {config.max_position_embeddings:,} learned positions, too few for {max_length:,} tokens: "
            "choose a smaller length, or another model"
        )
    _replace(section, dict.fromkeys(LENGTHS + _LENGTHS_OF_DATA, max_length))
    return _typed(section, path)


def _complete_section(network_class: type[LanguageModel], saved: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the `model` section of a checkpoint, or of the model class with the values of another format."""
    if is_complete(saved):
        section = deepcopy({**saved, "data": {"preprocessing": None, **saved["data"]}})
        _replace(section, _REPLACED)
        return section
    if not network_class.default_config:
        raise UserError(f"{path}: set {network_class.__name__}.default_config, which completes a converted model")
    values: dict[str, Any] = {key: saved[key] for key in _CONVERTED if key in saved}
    tokenizer = saved.get("tokenizer")
    if isinstance(tokenizer, Mapping):
        values["tokenizer"] = {key: tokenizer[key] for key in _CONVERTED_TOKENIZER if tokenizer.get(key) is not None}
    return complete_model_section(network_class.default_config, values)


def architecture(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a saved `model` section that another run of the same model must share.

    They determine the function that the weights compute, the lengths and the tokenizer.
    """
    complete = is_complete(saved)
    keys = [key for key in saved if key in _CONVERTED or (complete and affects_outputs(key))]
    tokenizer = saved.get("tokenizer")
    words = {} if not isinstance(tokenizer, Mapping) else tokenizer
    found = {
        key: value for key, value in words.items() if complete or (key in _CONVERTED_TOKENIZER and value is not None)
    }
    return {key: saved[key] for key in keys} | {f"tokenizer.{key}": value for key, value in found.items()}


def _replace(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the given dotted keys; skip keys that the section lacks."""
    for key, value in values.items():
        *groups, name = key.split(".")
        group: Any = section
        for below in groups:
            group = group.get(below) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            group[name] = value


def _typed(section: dict[str, Any], path: Path) -> ModelConfig:
    try:
        return read_model_section(section)
    except UserError as error:
        raise UserError(f"{path}: invalid model configuration: {error}") from error
