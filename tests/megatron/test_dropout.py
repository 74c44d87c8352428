# SPDX-License-Identifier: Apache-2.0
"""Dropout masks, compared with single draws of the random stream, and their statistics."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from bionemo.common import random_stream
from bionemo.megatron.dropout import (
    ATTENTION_OUTPUT,
    CROSS_OUTPUT,
    CROSS_PROBABILITIES,
    EMBEDDING,
    MLP_OUTPUT,
    PROBABILITIES,
    AttentionDropout,
    dropout,
    keep_mask,
    keep_scale,
    layer_site,
    token_dropout_keys,
)

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def some_keys(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))


def stays(key: int, counter: int, lane: int, probability: float) -> bool:
    """Return whether a 16-bit draw, between -32,768 and 32,767, keeps an activation."""
    word = int(random_stream.draw(np.array([key % 2**64], np.uint64), counter)[0])
    number = word >> 16 * lane & 0xFFFF
    return (number - 65536 if number >= 32768 else number) >= round(probability * 65536) - 32768


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of threads: on one thread numpy computes the random bits, otherwise torch."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def test_token_keys_are_drawn_from_segment_keys(threads: int) -> None:
    segments, ids, positions = some_keys(3), torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 7, 8])
    before = segments.clone()
    keys = token_dropout_keys(segments, ids, positions.int())
    for key, segment, position in zip(keys.tolist(), ids.tolist(), positions.tolist(), strict=True):
        word = np.array([int(segments[segment]) % 2**64], np.uint64)
        assert key % 2**64 == int(random_stream.draw(word, position)[0])
    assert torch.equal(segments, before)


@pytest.mark.parametrize(("number", "columns", "probability"), [(0, 8, 0.5), (7, 13, 0.1), (300, 1, 0.9), (2, 6, 0.0)])
def test_draws_depend_on_token_key_site_and_column(
    threads: int, number: int, columns: int, probability: float
) -> None:
    keys = some_keys(40)
    found = keep_mask(keys, number, columns, probability)
    expected = [
        [stays(key, number * 2**20 + column // 4, column % 4, probability) for column in range(columns)]
        for key in keys.tolist()
    ]
    assert found.tolist() == expected
    assert torch.equal(keys, some_keys(40))


def test_every_head_has_its_own_counters(threads: int) -> None:
    keys, n = some_keys(9), 5
    draws = AttentionDropout(keys, 4, first_head=2, num_heads=6, probability=0.4)
    starts = [4 * 2**20 + head * (2**20 // 6) for head in (3, 4)]
    expected = [
        [[stays(key, start + j // 4, j % 4, 0.4) for j in range(n)] for key in keys.tolist()[3:8]] for start in starts
    ]
    assert draws.keep_mask(slice(1, 3), slice(3, 3 + n), n).tolist() == expected
    with pytest.raises(AssertionError, match="supports sequences of 16 tokens"):
        draws._replace(num_heads=2**18).keep_mask(slice(0, 1), slice(0, 17), 17)


def test_sites_are_distinct() -> None:
    every = (PROBABILITIES, ATTENTION_OUTPUT, CROSS_PROBABILITIES, CROSS_OUTPUT, MLP_OUTPUT)
    places = [layer_site(layer, place) for layer in range(1, 5) for place in every]
    assert sorted({EMBEDDING, *places}) == [0, *range(5, 25)]


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5])
def test_share_of_dropped_activations(probability: float) -> None:
    stay = keep_mask(some_keys(1000), 5, 1000, probability)
    sigma = (probability * (1 - probability) / stay.numel()) ** 0.5
    assert abs(float(stay.double().mean()) - (1 - probability)) < 4 * sigma + 1 / 65536


def test_masks_are_independent_between_sites_heads_tokens_and_columns() -> None:
    keys = token_dropout_keys(torch.arange(2), torch.arange(2).repeat_interleave(512), torch.arange(512).repeat(2))
    masks = [keep_mask(keys, number, 512, 0.5).flatten() for number in (0, 3, 4)]
    first = masks[1].view(1024, 512)
    masks += [first.roll(1, 0).flatten(), first.roll(512, 0).flatten()]  # next token, other sequence
    masks += [first.roll(1, 1).flatten(), first.roll(4, 1).flatten()]  # next lane, next 64-bit draw
    draws = AttentionDropout(keys, 6, 0, 12, 0.5)
    masks += [mask.flatten() for mask in draws.keep_mask(slice(0, 2), slice(0, 512), 512).repeat(1, 2, 1)]
    masks += [draws.keep_mask(slice(0, 1), slice(0, 512), 512).mT.repeat(1, 2, 1).flatten()]  # key and query swapped
    signs = [mask.double() * 2 - 1 for mask in masks]
    for one, other in combinations(signs, 2):
        assert abs(float((one * other).mean())) < 5 / (len(one) / 2) ** 0.5  # some sequences are half as long, twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_kept_activations_and_their_gradients(dtype: torch.dtype) -> None:
    keys = some_keys(50)
    x = torch.randn(50, 1, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = dropout(x, keys, 9, 0.25)
    factors = keep_mask(keys, 9, 6, 0.25).view(50, 1, 6) / 0.75
    assert out.dtype == dtype
    torch.testing.assert_close(out, (x.double() * factors).to(dtype))
    out.sum().backward()
    torch.testing.assert_close(x.grad, factors.to(dtype))
    assert keep_scale(0.25) == 1 / 0.75
    assert torch.equal(dropout(x, keys, 9, 0.0), x)


def test_masks_of_a_subset_of_tokens_equal_those_of_the_whole() -> None:
    keys, x = some_keys(30), torch.ones(30, 1, 7)
    parts = [dropout(x[some], keys[some], 3, 0.5) for some in (slice(0, 11), slice(11, 30))]
    assert torch.equal(torch.cat(parts), dropout(x, keys, 3, 0.5))


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "aot_eager"),
        pytest.param("cpu", "inductor", marks=pytest.mark.slow),
        pytest.param("cuda", "inductor", marks=[pytest.mark.needs_gpu, NO_GPU]),
    ],
)
def test_compiled_dropout_is_equal(device: str, backend: str) -> None:
    keys, x = some_keys(30), torch.ones(30, 1, 7)
    compiled = torch.compile(dropout, fullgraph=True, backend=backend)
    found = compiled(x.to(device), keys.to(device), 300, 0.5)
    assert torch.equal(found.cpu(), dropout(x, keys, 300, 0.5))
