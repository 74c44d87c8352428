# SPDX-License-Identifier: Apache-2.0
"""What the shapes of the weights do not tell of a model: which class it is, and which tokens fill its table."""

from typing import Any

from bionemo.errors import UserError
from bionemo.models.language_model import LanguageModel


def identity(model: LanguageModel) -> dict[str, Any]:
    """What a checkpoint says of the model it belongs to."""
    return {"model._target_": model.config._target_, "vocabulary": model.vocabulary.identity}


def refuse_another_model(saved: dict[str, Any], model: LanguageModel) -> None:
    """Compare what a checkpoint says with the model that is to go on from it.

    Raises:
        UserError: naming what differs.
    """
    here = identity(model) | {"words": model.vocabulary.vocab_size}
    for key, value in here.items():
        there = saved.get(key) or value  # one made from a .nemo file knows how many words there are, not which
        if there != value:
            raise UserError(
                f"the checkpoint is of another model: its {key} is {_short(there)}, not {_short(value)}; start from "
                "a checkpoint of this model, or with another exp_manager.exp_dir"
            )


def _short(value: Any) -> str:
    return f"{len(value)} tokens ({' '.join(value[:8])} ...)" if isinstance(value, list) else str(value)
