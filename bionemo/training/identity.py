# SPDX-License-Identifier: Apache-2.0
"""Whether saved weights are those of the model that is to go on with them: its class, vocabulary and configuration."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.models.trainable import Trainable

log = logging.getLogger(__name__)

# Keys of the model that do not change the function its weights compute; a group stands for all keys below it. Every
# other key does, so a key that a new model brings is compared unless it is listed here.
_NOTED = (  # they change how training goes on
    "micro_batch_size", "global_batch_size", "hidden_dropout", "attention_dropout", "seed", "optim",
    "data.modify_percent", "data.mask_percent", "data.perturb_percent", "data.identity_percent",
    "data.mask_special_tokens", "data.seq_length_dec", "data.masked_lm_prob", "data.max_ngram_size",
    "data.encoder_augment", "data.canonicalize_encoder_input", "data.decoder_independent_augment",
    "data.canonicalize_decoder_output", "data.encoder_mask", "data.decoder_mask", "data.mask_prob",
    "data.span_lambda", "data.dynamic_padding", "data.drop_last", "data.long_sequences",
)  # fmt: skip
_FREE = (
    "_target_", "name", "init_method_std",
    # compared elsewhere: the class and the tokens in `Trainable.identity`, the sizes of tables in their shapes, the
    # order of the data in data/module.py
    "tokenizer", "make_vocab_size_divisible_by", "seq_length", "encoder_seq_length", "max_position_embeddings", "data",
    # layout and speed
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "compile",
    "native_amp_init_scale", "native_amp_growth_interval", "hysteresis", "activations_checkpoint_granularity",
    "activations_checkpoint_method", "activations_checkpoint_num_layers",
    # where a run starts, and what it does besides
    "resume_from_checkpoint", "restore_encoder_path", "validation", "dwnstr_task_validation", "drop_last",
)  # fmt: skip
_IMPLIED = {"normalization": "layernorm", "transformer_block_type": "pre_ln"}  # what null means
_SHOWN = 6


def refuse_another_model(saved: dict[str, Any], model: Trainable) -> None:
    """Compare the class and the vocabulary of a checkpoint with those of the model that is to go on from it.

    Raises:
        UserError: naming what differs.
    """
    here = model.identity | {"words": model.vocabulary.vocab_size}
    for key, value in here.items():
        there = saved.get(key) or value  # one made from a .nemo file knows how many words there are, not which
        if there != value:
            raise UserError(
                f"the checkpoint is of another model: its {key} is {_short(there)}, not {_short(value)}; start from "
                "a checkpoint of this model, or with another exp_manager.exp_dir"
            )


def refuse_another_function(source: object, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compare the configuration that weights were saved with to that of the model that takes them.

    Args:
        source: of the weights, for the message.
        saved: the `model` section that was saved, as far as it is known: keys that it lacks are not compared.
        here: the `model` section of this run.

    Raises:
        UserError: naming the keys under which the same weights would compute another function, and how to set them.
    """
    changed = [each for each in _differences(saved, here) if not _is_one_of(each[0], _FREE + _NOTED)]
    if str(source).endswith(".nemo") and (approximated := [each for each in changed if each[0] == "activation"]):
        _, there, now = approximated[0]
        if {there, now} == {"gelu", "gelu_tanh"}:  # v1's fused kernels imply the second
            log.warning(
                "%s was trained with model.activation=%s, this run uses %s, which differs by up to 5e-4: set "
                "model.activation=%s to continue with the same function", source, there, now, there,
            )  # fmt: skip
            changed.remove(approximated[0])
    if changed:
        said = ", ".join(f"model.{key} is {_value(there)} there and {_value(now)} here" for key, there, now in changed)
        words = " ".join(f"model.{key}={_value(there)}" for key, there, _ in changed)
        raise UserError(
            f"with this configuration the weights of {source} compute another function: {said}; set {words}, or start "
            "without them in another exp_manager.exp_dir"
        )


def note_other_settings(source: object, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say in one line which settings of training a resumed run changes."""
    changed = [each for each in _differences(saved, here) if _is_one_of(each[0], _NOTED)]
    if changed:
        said = ", ".join(f"model.{key} {_value(there)} -> {_value(now)}" for key, there, now in changed[:_SHOWN])
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        log.warning("not as in %s: %s%s", source, said, more)


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys that both have, with the saved value and the one here, where these differ."""
    if saved.get("kv_channels") != here.get("kv_channels"):  # else the numbers of heads say enough
        saved, here = _with_head_size(saved), _with_head_size(here)
    there = dict(_leaves(_explicit(saved)))
    for key, value in _leaves(_explicit(here)):
        if key in there and not _equal(there[key], value):
            yield key, there[key], value


def _explicit(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace null by what it stands for."""
    return {**config, **{key: value for key, value in _IMPLIED.items() if key in config and config[key] is None}}


def _with_head_size(config: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden, heads = (_number(config.get(key)) for key in ("hidden_size", "num_attention_heads"))
    if config.get("kv_channels") is not None or not hidden or not heads:
        return config
    return {**config, "kv_channels": int(hidden // heads)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(saved: Any, here: Any) -> bool:
    """Whether two values are the same; a number may be written as text in a `.nemo` file, as YAML reads 1e-5."""
    if isinstance(saved, str) and "${" in saved:  # refers to another key of a file whose references are not followed
        return True
    if isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        return len(saved) == len(here) and all(map(_equal, saved, here))
    number = _number(here)
    return bool(saved == here or (number is not None and number == _number(saved)))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _is_one_of(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _short(value: Any) -> str:
    return f"{len(value)} tokens ({' '.join(value[:8])} ...)" if isinstance(value, list) else _value(value)


def _value(value: Any) -> str:
    """As it is written in an override, shortened."""
    text = "null" if value is None else str(value)[:80]
    return text if text.isprintable() else repr(text)
