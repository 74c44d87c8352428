# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint, a .nemo archive or a directory of Hugging Face's to a model that computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bionemo.common.errors import UserError
from bionemo.config.compose import compose
from bionemo.config.paths import source
from bionemo.config.schema import ModelConfig
from bionemo.config.typed import Reader
from bionemo.inference.model import TrainedModel
from bionemo.interop.convert import Model, open_model
from bionemo.interop.shape_check import refuse_interpolations, short
from bionemo.megatron.sharded_state_dict import load_weights, refuse_other_weights
from bionemo.megatron.sharding import materialise, placements
from bionemo.models.build import model_class
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Vocabulary, load_tokenizer

# What a saved configuration decides of a network; the rest is about how it was trained, and is not looked at.
_SHAPES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "activation",
    "layernorm_epsilon", "make_vocab_size_divisible_by", "seq_length", "encoder_seq_length",
    "max_position_embeddings", "embedding_token_dropout", "embedding_layer_norm",
    "share_decoder_tokens_head_embeddings",
)  # fmt: skip
_LENGTHS = ("seq_length", "encoder_seq_length", "max_position_embeddings")
_WORDS = ("vocab_file", "merge_file", "num_sentinel_tokens")  # of its tokenizer


def load(
    path: str | Path, device: str | None = None, precision: str = "32", longest: int | None = None
) -> TrainedModel:
    """Open a trained model for use; of however many ranks it was, it is whole here.

    Args:
        path: of a checkpoint, a `.nemo` archive, or a directory of Hugging Face's.
        device: such as `cpu` or `cuda:1`; None: the first GPU, where there is one.
        precision: `32`, `bf16-mixed` or `16-mixed`, as in training.
        longest: tokens that it has to read, begin and end included, be it more than it was trained with, as rotary
            positions allow; None: no more.

    Raises:
        UserError: when there is no such model, it is damaged, or it cannot be used here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path, saved = saved_model(path)
    model = build(saved, path, longest)
    refuse_other_weights(placements(model), saved.weights)  # before memory is taken for what a configuration says
    materialise(model, torch.device(device))
    load_weights(placements(model), saved.weights)
    return TrainedModel(model.eval().requires_grad_(False), path, precision, saved.contact_head)


def saved_model(path: str | Path) -> tuple[Path, Model]:
    """Open what a user names.

    Raises:
        UserError: when there is no such model, or it is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{path}: there is no such checkpoint, .nemo archive or directory of Hugging Face's")
    return path, open_model(path)


def build(saved: Model, path: Path, longest: int | None = None) -> LanguageModel:
    """Make the network that a saved model tells of, without memory for its weights; see `load`.

    Raises:
        UserError: when it is of no known kind, its vocabulary is not at hand, or it cannot read such lengths.
    """
    kind = model_class(str(saved.config["_target_"]))
    config = model_config(kind, saved.config, path, longest)
    vocabulary = vocabulary_of(kind, config, saved, path)
    try:
        with torch.device("meta"):
            return kind(config, vocabulary)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: invalid model configuration: {short(error)}") from error


def vocabulary_of(kind: type[LanguageModel], config: ModelConfig, saved: Model, path: Path) -> Vocabulary:
    """What a saved model reads.

    Raises:
        UserError: when it is not at hand, or not the one that it was trained with.
    """
    vocabulary = load_tokenizer(kind.tokenizer, config.tokenizer)
    if saved.words is not None and vocabulary.vocab_size != saved.words:
        raise UserError(
            f"{path} knows {saved.words:,} tokens, and the vocabulary that is here {vocabulary.vocab_size:,}: give "
            "the files that it was trained with"
        )
    return vocabulary


def model_config(
    kind: type[LanguageModel], saved: Mapping[str, Any], path: Path, longest: int | None = None
) -> ModelConfig:
    """Complete what a saved model says of itself by what all of its kind have; see `load`.

    Raises:
        UserError: when it says what cannot be, or cannot read such lengths.
    """
    composed, _ = compose(source("pretrain"), ["name=use", f"model={kind.base}"])
    known: dict[str, Any] = {key: saved[key] for key in _SHAPES if key in saved and key in composed.model}
    words = saved.get("tokenizer")
    if isinstance(words, Mapping):
        known["tokenizer"] = {key: words[key] for key in _WORDS if words.get(key) is not None}
    refuse_interpolations(known, "model", path)  # OmegaConf would evaluate them
    for key in known.get("tokenizer", ()):
        if key not in composed.model.tokenizer:
            raise UserError(f"{path}: invalid model configuration: tokenizer.{key} is not a key of {kind.__name__}")
    composed.merge_with({"model": known})
    reader = Reader()
    config = reader.read(composed.model, ModelConfig)
    if config is None:
        raise UserError(f"{path}: invalid model configuration: {'; '.join(reader.problems[:3])}")
    if longest is None or longest <= config.max_position_embeddings:
        return config
    if not kind.rotary:
        raise UserError(
            f"{path} has learned {config.max_position_embeddings:,} positions, too few for {longest:,} tokens: give a "
            "length up to that, or another model"
        )
    composed.merge_with({"model": dict.fromkeys(_LENGTHS, longest)})
    longer = Reader().read(composed.model, ModelConfig)
    assert longer is not None
    return longer
