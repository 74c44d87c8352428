# SPDX-License-Identifier: Apache-2.0
"""Policies for long and empty records of any kind, applied when a split is opened."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError

_ACTIONS = {"crop": "cropped at a random position", "truncate": "truncated", "drop": "dropped"}


def apply_length_policy(
    lengths: NDArray[np.integer[Any]], limit: int, policy: str, label: str, noun: str, unit: str, choices: str
) -> tuple[NDArray[np.int64], str]:
    """Apply the policy for records [n] of more than `limit` units: `crop`, `truncate`, `drop` or `error`.

    Messages name the records (`noun`), their `unit` and the policies that do not fail (`choices`). Returns the records
    in use, int64, and a note about the long ones ("" if there are none).

    Raises:
        UserError: if the policy is `error` and there are long records, or if no record remains.
    """
    long, total = np.flatnonzero(lengths > limit), len(lengths)
    count, excess = f"{label}: {len(long):,} of {total:,} {noun}", f"are longer than {limit} {unit}"
    if policy == "error" and len(long):
        raise UserError(
            f"{count} {excess} (the first is record {long[0]:,} with {lengths[long[0]]:,}): raise model.seq_length, "
            f"or set model.data.long_sequences to {choices}"
        )
    records = np.delete(np.arange(total), long) if policy == "drop" else np.arange(total)
    if not len(records):
        raise UserError(
            f"{label}: all {total:,} {noun} {excess} and are dropped: raise model.seq_length, or set "
            "model.data.long_sequences to truncate"
        )
    note = f"{count} ({len(long) / total:.1%}) {excess} and are {_ACTIONS[policy]}" if len(long) else ""
    return records, note


def drop_empty(
    is_empty: NDArray[np.bool_], records: NDArray[np.int64], label: str, noun: str
) -> tuple[NDArray[np.int64], str]:
    """Remove empty records [n] from those in use; return the remaining ones and a note ("" if none is empty).

    Raises:
        UserError: if all are empty.
    """
    kept = records[~is_empty[records]]
    empty = len(records) - len(kept)
    if not len(kept):
        raise UserError(f"{label}: all {empty:,} {noun} are empty: check the files and their columns")
    return kept, f"{label}: {empty:,} of {len(records):,} {noun} are empty and are dropped" if empty else ""


def spread_evenly(records: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most `count` of the records, evenly spaced."""
    return records[np.arange(min(count, len(records))) * len(records) // min(count, len(records))]
