# SPDX-License-Identifier: Apache-2.0
"""Check that saved weights match a model in class, vocabulary and configuration."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.saved_model import TRAINING_KEYS, affects_outputs, includes_key
from bionemo.models.trainable import Trainable

log = logging.getLogger(__name__)

_DEFAULTS = {"normalization": "layernorm", "transformer_block_type": "pre_ln"}  # meaning of null
_MAX_LISTED = 6  # differences in a message
_LONGEST = 4000  # characters of an override, which is to be copied


def check_same_model(saved: dict[str, Any], model: Trainable) -> None:
    """Check class and vocabulary of a checkpoint.

    Args:
        saved: `model` in the state of the checkpoint; unknown values are missing.
        model: model that is to load the checkpoint.

    Raises:
        UserError: if they differ.
    """
    for key, value in (model.identity | {"words": model.vocabulary.vocab_size}).items():
        found = saved.get(key) or value  # a checkpoint converted from a .nemo file has the size of the vocabulary only
        if found != value:
            name = "vocabulary size" if key == "words" else key
            raise UserError(
                f"the checkpoint belongs to another model: its {name} is {_format_tokens(found)}, not "
                f"{_format_tokens(value)}; use a checkpoint of this model, or set another exp_manager.exp_dir"
            )


def check_same_function(source: object, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Check that weights compute the same function with this configuration as with the one they were trained with.

    Args:
        source: path of the weights, for the message.
        saved: `model` section with which the weights were trained; missing keys are not compared.
        config: `model` section of this run.

    Raises:
        UserError: if it differs; names the keys and how to set them.
    """
    changed = [each for each in _differences(saved, config) if affects_outputs(each[0])]
    if str(source).endswith(".nemo"):
        for difference in [each for each in changed if each[0] == "activation"]:
            _, old, new = difference
            if {old, new} == {"gelu", "gelu_tanh"}:  # v1's fused kernels computed gelu_tanh
                log.warning(
                    "%s was trained with model.activation=%s, this run uses %s, which differs by up to 5e-4: set "
                    "model.activation=%s to continue with the same function", source, old, new, old,
                )  # fmt: skip
                changed.remove(difference)
    if changed:
        listed = ", ".join(f"model.{key} was {_format(old)} and is now {_format(new)}" for key, old, new in changed)
        overrides = " ".join(f"model.{key}={_format(old, _LONGEST)}" for key, old, _ in changed)
        raise UserError(
            f"with this configuration the weights of {source} compute another function: {listed}; set {overrides}, or "
            "start without these weights (in another exp_manager.exp_dir, or without restore_from_path)"
        )


def log_changed_settings(source: object, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Log in one line which training settings a resumed run changes."""
    changed = [each for each in _differences(saved, config) if includes_key(TRAINING_KEYS, each[0])]
    if changed:
        listed = ", ".join(f"model.{key} {_format(old)} -> {_format(new)}" for key, old, new in changed[:_MAX_LISTED])
        more = f" and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        log.warning("settings changed since %s: %s%s", source, listed, more)


def _differences(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, saved value and current value of keys that both have, where the values differ."""
    if saved.get("kv_channels") != config.get("kv_channels"):  # otherwise the numbers of heads suffice
        saved, config = _with_head_size(saved), _with_head_size(config)
    old_values = dict(_flatten(_with_defaults(saved)))
    for key, value in _flatten(_with_defaults(config)):
        if key in old_values and not _equal(old_values[key], value):
            yield key, old_values[key], value


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **{key: value for key, value in _DEFAULTS.items() if key in config and config[key] is None}}


def _with_head_size(config: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden, heads = (_to_number(config.get(key)) for key in ("hidden_size", "num_attention_heads"))
    if config.get("kv_channels") is not None or not hidden or not heads:
        return config
    return {**config, "kv_channels": int(hidden // heads)}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(saved: Any, value: Any) -> bool:
    """Compare values; a `.nemo` file may contain numbers as text, because YAML reads 1e-5 as text."""
    if isinstance(saved, str) and "${" in saved:  # an unresolved reference to another key
        return True
    if isinstance(saved, list | tuple) and isinstance(value, list | tuple):
        return len(saved) == len(value) and all(map(_equal, saved, value))
    number = _to_number(value)
    return bool(saved == value or (number is not None and number == _to_number(saved)))


def _to_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _format_tokens(value: Any) -> str:
    return f"{len(value)} tokens ({' '.join(map(str, value[:8]))} ...)" if isinstance(value, list) else _format(value)


def _format(value: Any, length: int = 80) -> str:
    """Format a value as in an override, shortened."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else "null" if value is None else str(value)
    text = text[:length]
    return text if text.isprintable() else repr(text)
