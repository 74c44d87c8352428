# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is of the model that is to go on from it."""

from typing import Any

from bionemo.errors import UserError
from bionemo.models.trainable import Trainable


def refuse_another_model(saved: dict[str, Any], model: Trainable) -> None:
    """Compare what a checkpoint says with the model that is to go on from it.

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


def _short(value: Any) -> str:
    return f"{len(value)} tokens ({' '.join(value[:8])} ...)" if isinstance(value, list) else str(value)
