# SPDX-License-Identifier: Apache-2.0
"""The MODEL of a command line: `bionemo COMMAND MODEL ...` or `model=MODEL`. Imports nothing heavy.

`formats.detect.locate_model` says what a MODEL is.
"""

import os
import re
from collections.abc import Iterable

from bionemo.common.errors import UserError

BEST = ":best"  # after the directory of a run
HELP = (
    "RUN (newest checkpoint of a run), RUN:best, a checkpoint, .nemo archive, directory of Hugging Face or BioNeMo 2, "
    "adapter of peft, .pt of fair-esm, or hf://ORG/NAME[@REVISION] of the hub"
)
_NAMED = "model="
# `Path` reduces the two slashes to one; the hub does not allow -- and .. in names
_HUB_ID = re.compile(
    r"(hf://?)?(?![^@]*--|[^@]*\.git(?:@|$)|.*\.\.)([a-z0-9][\w.-]*/\w(?:[\w.-]*\w)?)(?:@([\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)


def model_word(word: str) -> str:
    """Return the MODEL in a word `MODEL` or `model=MODEL`."""
    return word.removeprefix(_NAMED)


def hub_id(model: str) -> tuple[str, str | None] | None:
    """Return id and revision (None: the default) of a model of the Hugging Face hub; None if a MODEL is a path.

    `hf://` may be omitted unless something exists at the path, or its first directory: then it is a misspelt path.
    """
    found = _HUB_ID.fullmatch(model)
    if found is None:
        return None
    may_be_path = model.endswith(".nemo") or os.path.exists(model) or os.path.isdir(model.partition("/")[0])
    return None if may_be_path and not found[1] else (found[2], found[3])


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
        exists = os.path.exists(os.path.expanduser(word.removesuffix(BEST)))
        if has_groups and is_path and not exists and not hub_id(word):
            is_path = False
            if not equals and word[0] != "~":
                raise UserError(f"cannot read '{word}': it is neither key=value nor the path or id of a model")
        if equals and key.lstrip("+") == "model" and not has_groups:
            models.append(value)
        elif is_path and (word[0] != "~" or "/" in word):
            models.append(word)
        else:
            others.append(word)
    if len(models) > 1:
        raise UserError(f"{models[0]!r} and {models[1]!r}: give one MODEL, and write key=value for others")
    return (models[0] if models else None), others
