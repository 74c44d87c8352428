# SPDX-License-Identifier: Apache-2.0
"""Policies for long sequences select records and produce a note or an error."""

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.data.policies import apply_length_policy

LENGTHS = np.array([5, 31, 30, 400, 2], np.int32)
NAMES = ("train data", "sequences", "residues", "crop, truncate or drop")


@pytest.mark.parametrize(
    ("policy", "left", "word"),
    [("crop", [0, 1, 2, 3, 4], "random"), ("truncate", [0, 1, 2, 3, 4], "truncated"), ("drop", [0, 2, 4], "dropped")],
)
def test_policies_for_long_sequences_write_a_note(policy: str, left: list[int], word: str) -> None:
    records, notice = apply_length_policy(LENGTHS, 30, policy, *NAMES)
    assert records.tolist() == left
    assert notice.startswith("train data: 2 of 5 sequences (40.0%)")
    assert word in notice
    assert apply_length_policy(LENGTHS, 400, policy, *NAMES)[1] == ""


def test_the_error_policy_names_and_counts_long_sequences() -> None:
    message = r"train data: 2 of 5 sequences .* 30 residues .*record 1 with 31\).* crop, truncate or drop"
    with pytest.raises(UserError, match=message):
        apply_length_policy(LENGTHS, 30, "error", *NAMES)
    records, notice = apply_length_policy(LENGTHS, 400, "error", *NAMES)
    assert (records.tolist(), notice) == ([0, 1, 2, 3, 4], "")
    with pytest.raises(UserError, match="all 5 sequences are longer than 1 residues and are dropped"):
        apply_length_policy(LENGTHS, 1, "drop", *NAMES)
