# SPDX-License-Identifier: Apache-2.0
"""The loss of the output projection equals the cross-entropy of all logits at once, in double precision."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bionemo.megatron import groups, vocabulary
from bionemo.megatron.vocabulary import VocabularyProjection
from tests.planning.storage_meter import StorageMeter
from tests.support.parallel_layouts import Layout, on_every_process

ENTRIES, PADDED, WIDTH, ROWS = 40, 64, 8, 30
CHUNKS = {"no chunks": PADDED * ROWS, "chunks of 7 rows": PADDED * 7, "chunks of one row": PADDED}


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias and target ids."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((ROWS, WIDTH), (PADDED, WIDTH), (PADDED,))
    )
    return x, weight, bias, torch.randint(ENTRIES, (ROWS,), generator=generator)


def expected(bias: bool) -> list[Tensor]:
    """Return the loss and the gradients of hidden states, weight and bias."""
    x, weight, offset, ids = operands()
    leaves = [each.double().requires_grad_() for each in (x, weight, *([offset] if bias else []))]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if bias else None)[:, :ENTRIES]
    loss = F.cross_entropy(logits, ids, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]


def found(bias: bool, chunk: int, half: bool = False) -> list[Tensor]:
    """Return the same of this tensor rank's part of the vocabulary."""
    x, weight, offset, ids = operands()
    head = VocabularyProjection(PADDED, ENTRIES, bias=bias)
    part = slice(groups.tensor_rank() * head.shard_size, (groups.tensor_rank() + 1) * head.shard_size)
    if head.bias is not None:
        head.bias.data.copy_(offset[part])
    leaves = [x.requires_grad_(), weight[part].clone().requires_grad_(), *head.parameters()]
    with patch.object(vocabulary, "CHUNK", chunk // groups.tensor_size()):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = head.cross_entropy(leaves[0], ids, leaves[1])
            with torch.no_grad():
                assert torch.equal(head.cross_entropy(leaves[0], ids, leaves[1]), loss)
        return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]


def assert_close(bias: bool, results: list[Tensor], tolerance: float) -> None:
    for each, whole in zip(results, expected(bias), strict=True):
        part = whole[: len(each)] if each.ndim else whole  # of rank 0
        assert each.dtype == torch.float32
        assert (each - part).abs().max() <= tolerance * part.abs().max()


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("half", [False, True])
def test_loss_and_gradients_are_those_of_all_logits(bias: bool, half: bool, chunk: int) -> None:
    with groups.simulate(1, 1, 0):
        assert_close(bias, found(bias, chunk, half), 2e-2 if half else 1e-6)


def results_of_a_rank(layout: Layout, chunk: int) -> list[Tensor]:
    return found(True, chunk)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=4)], ids=str)
def test_loss_and_gradients_of_a_divided_vocabulary(layout: Layout, tmp_path: Path) -> None:
    """With four ranks, the last one has padding only."""
    results = on_every_process(layout, results_of_a_rank, CHUNKS["chunks of 7 rows"], directory=tmp_path)
    assert_close(True, results, 1e-6)


def test_no_targets() -> None:
    with groups.simulate(1, 1, 0):
        head = VocabularyProjection(PADDED, ENTRIES)
        x, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(PADDED, WIDTH, requires_grad=True)
        loss = head.cross_entropy(x, torch.zeros(0, dtype=torch.long), weight)
        loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_quarter_of_the_memory() -> None:
    """As GPT-3 with 16 rows of 2,048 tokens and a vocabulary of 50,304, in bf16, with all sizes divided by 16."""
    rows, entries, width = 2048, 3144, 48
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(entries, width, requires_grad=True)
    ids = torch.randint(entries, (rows,))
    peaks = []
    with groups.simulate(1, 1, 0), torch.autocast("cpu", torch.bfloat16):
        head = VocabularyProjection(entries, entries, bias=False)
        for chunk in (vocabulary.CHUNK, vocabulary.CHUNK // 256):
            with patch.object(vocabulary, "CHUNK", chunk), StorageMeter() as meter:
                head.cross_entropy(x, ids, weight).backward()
            peaks.append(meter.peak)
    assert peaks[0] > 12 * rows * entries  # logits in bf16 and fp32, log-probabilities and gradients
    assert peaks[1] < peaks[0] / 4
