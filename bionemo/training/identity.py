# SPDX-License-Identifier: Apache-2.0
"""Check that saved weights match a model in class, vocabulary and configuration."""

import logging
from collections.abc import Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.model_differences import differences
from bionemo.config.saved_model import TRAINING_KEYS, affects_outputs, includes_key
from bionemo.models.trainable import Trainable

log = logging.getLogger(__name__)

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
            difference = f"its {name} is {_format(found)}, not {_format(value)}"
            if key == "vocabulary":
                difference = f"its vocabulary differs: {model.vocabulary.describe_difference(found)}"
            raise UserError(
                f"the checkpoint belongs to another model: {difference}; use a checkpoint of this model, or set "
                "another exp_manager.exp_dir"
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
    changed = [each for each in differences(saved, config) if affects_outputs(each[0])]
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
    changed = [each for each in differences(saved, config) if includes_key(TRAINING_KEYS, each[0])]
    if changed:
        listed = ", ".join(f"model.{key} {_format(old)} -> {_format(new)}" for key, old, new in changed[:_MAX_LISTED])
        more = f" and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        log.warning("settings changed since %s: %s%s", source, listed, more)


def _format(value: Any, length: int = 80) -> str:
    """Format a value as in an override, shortened."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else "null" if value is None else str(value)
    text = text[:length]
    return text if text.isprintable() else repr(text)
