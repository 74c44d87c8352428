# SPDX-License-Identifier: Apache-2.0
"""The MODEL of a command line: `bionemo COMMAND MODEL ...` or `model=MODEL`. Imports nothing heavy.

`formats.detect.locate_model` says what a MODEL is.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from bionemo.common.errors import UserError

BEST = ":best"  # after the directory of a run
HELP = "RUN (newest checkpoint of a run), RUN:best, a checkpoint, .nemo, Hugging Face directory or .pt of fair-esm"
_NAMED = "model="


def model_path(word: str) -> Path:
    """Return the path in a word `MODEL` or `model=MODEL`."""
    return Path(word.removeprefix(_NAMED))


def split_model(words: Iterable[str], has_groups: bool = False) -> tuple[str | None, list[str]]:
    """Separate the MODEL of a command line from its other words, `key=value` and `~key`.

    Args:
        words: arguments that are not flags. A path may contain `=` after a slash (RUN/checkpoints/step=8-last).
        has_groups: whether `model=` and names with a slash are groups of configuration files; a path must then exist.

    Raises:
        UserError: if there are several models, or a word is nothing of these.
    """
    models, others = [], []
    for word in words:
        key, equals, value = word.partition("=")
        is_path = not equals or ("/" in key and not key.lstrip("+~").startswith("hydra/"))
        if has_groups and is_path and not os.path.exists(os.path.expanduser(word.removesuffix(BEST))):
            is_path = False
            if not equals and word[0] != "~":
                raise UserError(f"cannot read '{word}': it is neither key=value nor the path of a model")
        if equals and key.lstrip("+") == "model" and not has_groups:
            models.append(value)
        elif is_path and (word[0] != "~" or "/" in word):
            models.append(word)
        else:
            others.append(word)
    if len(models) > 1:
        raise UserError(f"{models[0]!r} and {models[1]!r}: give one MODEL, and write key=value for others")
    return (models[0] if models else None), others
