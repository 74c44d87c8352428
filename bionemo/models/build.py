# SPDX-License-Identifier: Apache-2.0
"""From the name in the configuration to a model class."""

from bionemo.common.errors import UserError
from bionemo.config.targets import resolve
from bionemo.models.language_model import LanguageModel


def model_class(target: str) -> type[LanguageModel]:
    """Import the class that `model._target_` names.

    Raises:
        UserError: when there is no such class, or it is not one of our models: nothing else is ever called by name.
    """
    found = resolve(target)
    if not (isinstance(found, type) and issubclass(found, LanguageModel)):
        raise UserError(f"model._target_={target} is not a model: it must derive from {LanguageModel.__name__}")
    return found
