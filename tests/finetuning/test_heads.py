# SPDX-License-Identifier: Apache-2.0
"""Prediction heads have the sizes of v1, and packed sequences do not influence each other."""

import pytest
import torch
from torch import nn

from bionemo.finetuning.heads import SequenceHead, TokenHead


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_sizes_equal_v1() -> None:
    """Values from v1's tests: a regression head of molecules, and ESM-1nv with three heads over a convolution."""
    assert parameters(SequenceHead(512, 1, (128,))) == 66_817
    heads = [TokenHead(768, classes) for classes in (3, 8, 2)]
    first = parameters(heads[0].first)
    assert 43_612_544 + first + sum(parameters(head.second) for head in heads) == 43_787_533


@pytest.mark.parametrize("lengths", [[1], [5, 1, 40, 2, 3], [7, 7, 7]])
def test_packed_sequences_do_not_influence_each_other(lengths: list[int]) -> None:
    """Compare with each sequence alone, zero-padded, in torch's own convolutions."""
    torch.manual_seed(0)
    head = TokenHead(16, 3).eval()
    vectors = torch.randn(sum(lengths), 16)
    found = head(vectors, lengths)
    expected = [head.second(torch.relu(head.first(each.T[None])))[0].T for each in vectors.split(lengths)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_sequence_head_equals_the_formula() -> None:
    head = SequenceHead(8, 2, (4, 3), 0.0)
    x = torch.randn(5, 8)
    first, second, last = (each for each in head.layers if isinstance(each, nn.Linear))
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    expected = last(torch.relu(second(torch.relu(first(normed)))))
    torch.testing.assert_close(head(x, [1] * 5), expected)
