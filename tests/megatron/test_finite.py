# SPDX-License-Identifier: Apache-2.0
"""Detection of tensors with NaN or infinity."""

import math

import pytest
import torch

from bionemo.megatron.finite import all_finite, find_non_finite

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 1023])
def test_a_single_nonfinite_value_is_found(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.zeros(1024, dtype=dtype)
    tensor[place] = bad
    others = [torch.ones(3, 5), torch.zeros(0)]
    assert not all_finite([*others, tensor])
    assert not all_finite([*others, tensor.view(32, 32).t()])
    assert not all_finite([tensor[place]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum and the sum of their squares overflow."""
    large = torch.full((100, 100), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite([large, -large, torch.zeros(0)])
    assert all_finite([large, torch.ones(1), torch.full((2,), 1e300, dtype=torch.float64)])
    assert all_finite([])


def test_groups_are_named() -> None:
    groups = {"a": [torch.ones(3)], "b": [torch.ones(3), torch.tensor([math.nan])], "c": [torch.tensor(-math.inf)]}
    assert find_non_finite(groups, torch.device("cpu")) == ["b", "c"]
