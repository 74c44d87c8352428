# SPDX-License-Identifier: Apache-2.0
"""Global batches contain every record once per epoch and do not depend on the position where the sampler started."""

import time
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.data.packing import pack, pad
from bionemo.data.sampler import DataPosition, GlobalBatch, GlobalBatchSampler, SampleStream

MAX_LENGTH = 64


def make_sampler(
    number: int = 90,
    *,
    rows: int = 4,
    epochs: int | None = 2,
    window: int = 32,
    shuffle: bool = True,
    plan: Any = pack,
    drop_last: bool = False,
) -> GlobalBatchSampler:
    lengths = np.random.default_rng(1).integers(3, MAX_LENGTH + 1, 2 * number)
    records = np.sort(np.random.default_rng(2).permutation(2 * number)[:number])  # some records are not used
    stream = SampleStream(records, seed=7, shuffle=shuffle, epochs=epochs)
    return GlobalBatchSampler(stream, lengths, plan, MAX_LENGTH, rows, window, drop_last)


def samples(steps: list[GlobalBatch]) -> list[tuple[int, int]]:
    """Return epoch and record of every sample, in order."""
    rows = [row for step in steps for row in step.rows]
    return [pair for epochs, records in rows for pair in zip(epochs.tolist(), records.tolist(), strict=True)]


def same(one: list[GlobalBatch], other: list[GlobalBatch]) -> bool:
    return [(samples([step]), step.next_position) for step in one] == [
        (samples([step]), step.next_position) for step in other
    ]


@settings(max_examples=40)
@given(
    number=st.integers(1, 70), rows=st.integers(1, 40), epochs=st.integers(1, 4), window=st.integers(1, 100),
    shuffle=st.booleans(), plan=st.sampled_from([pack, pad]),
)  # fmt: skip
def test_every_record_is_sampled_once_per_epoch(
    number: int, rows: int, epochs: int, window: int, shuffle: bool, plan: Any
) -> None:
    sampler = make_sampler(number, rows=rows, epochs=epochs, window=window, shuffle=shuffle, plan=plan)
    steps = list(sampler.batches(DataPosition()))
    expected = {(epoch, record) for epoch in range(epochs) for record in sampler.stream.records.tolist()}
    assert Counter(samples(steps)) == Counter(expected)
    assert len(steps) == -(-sampler.count_rows() // sampler.global_batch_size)
    assert all(len(step.rows) == rows for step in steps[:-1])
    assert 1 <= len(steps[-1].rows) <= rows
    for step in steps:
        assert all(sampler.lengths[records].sum() <= MAX_LENGTH for _, records in step.rows)
    last = steps[-1].next_position
    assert last.consumed_samples == number * epochs
    assert last.consumed_tokens == epochs * sampler.lengths[sampler.stream.records].sum()


def test_drop_last_omits_only_the_last_batch() -> None:
    whole, full = (make_sampler(rows=6, drop_last=drop) for drop in (False, True))
    steps = list(whole.batches(DataPosition()))
    assert len(steps[-1].rows) < 6
    assert same(list(full.batches(DataPosition())), steps[:-1])
    assert full.count_rows() // full.global_batch_size == len(steps) - 1
    assert list(make_sampler(5, rows=100, drop_last=True).batches(DataPosition())) == []


@pytest.mark.parametrize(("rows", "window"), [(1, 32), (4, 32), (5, 9), (64, 32), (3, 500)])
def test_resuming_yields_the_remaining_batches(rows: int, window: int) -> None:
    sampler = make_sampler(rows=rows, window=window)
    steps = list(sampler.batches(DataPosition()))
    assert len(steps) >= 2
    for done, step in enumerate(steps, 1):
        assert same(list(sampler.batches(step.next_position)), steps[done:])


def test_an_endless_stream_can_be_resumed() -> None:
    sampler = make_sampler(epochs=None)
    steps = list(islice(sampler.batches(DataPosition()), 300))
    assert max(epoch for epoch, _ in samples(steps)) > 4
    assert same(list(islice(sampler.batches(steps[99].next_position), 200)), steps[100:])


def test_each_epoch_has_its_own_order_unless_shuffling_is_off() -> None:
    stream = SampleStream(np.arange(1000), seed=3)
    epochs, records = stream.read(0, 3000)
    assert epochs.tolist() == np.repeat([0, 1, 2], 1000).tolist()
    first, second, third = np.split(records, 3)
    assert (first == second).sum() < 10 > (second == third).sum()
    assert (SampleStream(np.arange(1000), seed=4).read(0, 1000)[1] == first).sum() < 10
    assert SampleStream(np.arange(5) * 2, seed=3, shuffle=False).read(4, 8)[1].tolist() == [8, 0, 2, 4]


@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 3))
def test_windows_are_parts_of_one_stream(number: int, size: int, epochs: int) -> None:
    stream = SampleStream(np.arange(number), seed=5, epochs=epochs)
    whole = [column.tolist() for column in stream.read(0, number * epochs)]
    pieces = [stream.read(start, start + size) for start in range(0, number * epochs + 2 * size, size)]
    assert [np.concatenate(column).tolist() for column in zip(*pieces, strict=True)] == whole


@pytest.mark.parametrize("number", [100, 1_000_000])
def test_the_start_time_does_not_depend_on_the_position(number: int) -> None:
    stream = SampleStream(np.arange(number), seed=1)
    sampler = GlobalBatchSampler(stream, np.full(number, 300), pack, 1024, 8, packing_window=2048)
    seconds = []
    for window in range(10**6, 10**6 + 5):
        start = time.process_time()  # other processes may use the cores
        step = next(sampler.batches(DataPosition(window * 2048)))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05
    first, last = window * 2048 // number, (window * 2048 + 2047) // number
    assert all(first <= epoch <= last for epoch, _ in samples([step]))
