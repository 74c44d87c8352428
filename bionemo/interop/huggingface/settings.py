# SPDX-License-Identifier: Apache-2.0
"""What the readers of a config.json have in common."""

import math
from collections.abc import Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.interop.shape_check import size_of

Shares = Mapping[str, tuple[str, float]]  # our key -> theirs, and what is meant when nothing is said


def refuse_other_values(settings: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """See that settings have the one value under which the weights mean what they mean here, or none.

    Raises:
        UserError: naming the first that has another.
    """
    for key, value in only.items():
        said = settings.get(key, value)
        nothing = said is None and value is False
        if not nothing and (said != value or isinstance(said, bool) != isinstance(value, bool)):
            raise UserError(f"its config.json says {key}: {str(said)[:50]!r}, of which {value} alone is read")


def read_shares(settings: Mapping[str, Any], shares: Shares) -> dict[str, float]:
    """Numbers from 0 on, under our keys.

    Raises:
        UserError: naming the first that is none.
    """
    found = {ours: settings.get(theirs, default) for ours, (theirs, default) in shares.items()}
    for ours, value in found.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UserError(f"its {shares[ours][0]} is {str(value)[:50]!r}, no number from 0 on")
    return found


def write_shares(config: Mapping[str, Any], shares: Shares) -> dict[str, Any]:
    """The same under their keys."""
    return {theirs: config.get(ours, default) for ours, (theirs, default) in shares.items()}


def refuse_uneven_heads(settings: Mapping[str, Any], hidden: str, heads: str) -> None:
    """See that a layer's width is divided evenly among its heads.

    Raises:
        UserError: naming both keys.
    """
    if size_of(settings, hidden) % size_of(settings, heads):
        raise UserError(f"its {hidden} {settings[hidden]} is not divisible by its {heads} {settings[heads]}")


def refuse_other_heads(config: Mapping[str, Any], name: str) -> None:
    """See that a model of ours has heads of hidden_size / num_attention_heads, which theirs have always.

    Raises:
        UserError: when it has others.
    """
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if config.get("kv_channels") not in (None, hidden // heads) or hidden % heads:
        raise UserError(f"its heads are of {config.get('kv_channels')}, {name}'s of hidden_size / num_attention_heads")
