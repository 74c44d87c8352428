# SPDX-License-Identifier: Apache-2.0
"""The model from whose weights a run starts: its architecture and tokenizer become those of the run."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from bionemo.common.console import notify
from bionemo.config.model_argument import BEST, hub_id
from bionemo.config.paths import ConfigSource, find_source


def add_architecture(
    source: ConfigSource, overrides: Sequence[str], named: bool, sweep: bool
) -> tuple[ConfigSource, list[str]]:
    """Return the source and the overrides of a run; if it starts from a model, with the architecture of the model.

    The default configuration of the model's class is used, unless the user names one, which keeps its lengths.
    Keys that the user overrides keep these values. In a sweep, the first values of other keys are composed.

    Raises:
        UserError: if the model cannot be opened, or the configuration cannot be composed.
    """
    given = dict(each.lstrip("+").partition("=")[::2] for each in overrides)
    model = given.get("restore_from_path", "null")
    is_here = hub_id(model) or os.path.exists(os.path.expanduser(model.removesuffix(BEST)))
    if model.lower() in ("", "null") or (named and not is_here):  # `bionemo launch` can run where the model is not
        return source, [*overrides]
    # Imported here, because runs without a MODEL must not wait for torch.
    from bionemo.config.compose import compose, expand_sweep, rewrite_overrides
    from bionemo.formats.convert import open_config
    from bionemo.inference.load import LENGTHS, architecture
    from bionemo.models.language_model import load_model_class

    saved = open_config(model)
    target = str(saved["_target_"])
    first: list[str] = []
    if not named and (default := load_model_class(target).default_config):
        source = find_source("pretrain")
        first = [f"model={default}", f"name={re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(model).stem)}-continued"]
    rewritten = rewrite_overrides(source, [*first, *overrides], sweep)
    section: Any = compose(source, expand_sweep(source, rewritten)[0] if sweep else rewritten)[0].get("model") or {}
    if section.get("_target_") != target:
        return source, [*first, *overrides]
    values, keys = architecture(saved), set(map(str, section))  # `in section` is False for a key without a value
    # the others follow from seq_length in the configuration
    lengths = [
        key for key in LENGTHS if named or (key != "seq_length" and values.get(key) == values.get("seq_length"))
    ]
    skipped = {*lengths, *(key.removeprefix("model.") for key in given)}
    values = {key: each for key, each in values.items() if key.partition(".")[0] in keys and key not in skipped}
    changed = [
        key for key, value in values.items() if named and not _same(reduce(_get, key.split("."), section), value)
    ]
    if changed:
        notify(f"{model} determines {', '.join(f'model.{key}={_format(values[key])}' for key in changed)}")
    return source, [*first, *(f"model.{key}={_format(value)}" for key, value in values.items()), *overrides]


def _get(section: Any, key: str) -> Any:
    return section.get(key) if section else None


def _same(found: Any, value: Any) -> bool:
    """Compare a value of a file, in which 1e-5 is text, with that of a model."""
    with suppress(TypeError, ValueError):
        return bool(found == value or float(found) == value)
    return False


def _format(value: Any) -> str:
    return "null" if value is None else f"[{','.join(map(_format, value))}]" if isinstance(value, list) else str(value)
