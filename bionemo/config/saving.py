# SPDX-License-Identifier: Apache-2.0
"""Rules for the names that a run gives to directories, checkpoints and archives."""

import re
from collections.abc import Iterator
from pathlib import PurePath

from bionemo.config.schema import ExpManagerConfig

FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")  # {val_loss:.2f} in the name of a checkpoint
WHOLE_NUMBERS = ("step", "global_step", "epoch", "consumed_samples")  # known without a validation
_PARAMS = "exp_manager.checkpoint_callback_params"
_LONGEST = 255 - len("-v99-last.unfinished")  # bytes of a name


def check_saving(manager: ExpManagerConfig) -> Iterator[str]:
    """Give everything about names that would fail, or write elsewhere, when the first checkpoint is saved."""
    params = manager.checkpoint_callback_params
    for key in ("name", "version"):
        value = getattr(manager, key)
        if value is not None and (PurePath(value).is_absolute() or ".." in PurePath(value).parts):
            yield f"exp_manager.{key} is {value}, expected a name: the directory is set by exp_manager.exp_dir"
    for key in ("prefix", "postfix"):
        value = getattr(params, key)
        if value is not None and ("/" in value or value == ".."):
            yield f"{_PARAMS}.{key} is {value}, expected part of a file name, without /"
    if params.filename:
        yield from _filename(params.filename)


def _filename(pattern: str) -> Iterator[str]:
    key = f"{_PARAMS}.filename is {pattern}"
    if "/" in pattern or "\0" in pattern:
        yield f"{key}, expected a name, without /: the directory is set by {_PARAMS}.dirpath"
        return
    for name, form in FIELD.findall(pattern):
        try:
            if any(int(number) > _LONGEST for number in re.findall(r"\d+", form)):
                raise ValueError("it is too long")
            sample(name, form)
        except ValueError as error:
            number = "whole number" if name in WHOLE_NUMBERS else "number"
            yield f"{key}, but {{{name}:{form}}} does not format a {number} ({error}): write {{{name}:.2f}}"
            return
    filled = FIELD.sub(lambda match: f"{match[1]}={sample(match[1], match[2] or '')}", pattern)
    if "/" in filled or filled in (".", "..") or not filled.strip():
        yield f"{key}, expected a name, such as {{step}}-{{val_loss:.2f}}"
    elif filled.endswith(("-last", ".unfinished", ".replaced")):
        yield f"{key}, expected a name that does not end in -last, .unfinished or .replaced, which have a meaning"
    elif len(filled.encode()) > _LONGEST:
        yield f"{key}, which makes {len(filled.encode())} bytes, expected at most {_LONGEST}"


def sample(name: str, form: str) -> str:
    """Format a value of the kind that a name stands for.

    Raises:
        ValueError: when the format is not one for such a value.
    """
    return format(1_000_000 if name in WHOLE_NUMBERS else 1.5, form)
