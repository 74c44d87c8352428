# SPDX-License-Identifier: Apache-2.0
"""What is trained on depends on neither workers, ranks nor micro-batches, and resuming leaves nothing out."""

import errno
import gc
import multiprocessing
import os
import pickle
from ast import literal_eval
from collections import Counter
from copy import deepcopy
from functools import cache, reduce
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.data_module import SequenceData, Steps, TrainStep
from bionemo.data.proteins.masking import MaskedSamples
from bionemo.data.sampler import Position
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.training.runs import FORK

BASE = [
    "data=mock", "model.seq_length=64", "model.data.mock.num_sequences=150", "model.data.mock.min_length=5",
    "model.data.mock.max_length=90", "model.data.packing_window=64", "model.data.num_workers=0", "model.seed=11",
]  # fmt: skip


@cache
def composed() -> RunConfig:
    return load("pretrain_small", BASE, EXAMPLES / "esm1nv" / "conf")


def sequence_data(*overrides: str, rank: int = 0, ranks: int = 1) -> SequenceData:
    cfg = deepcopy(composed())  # composing anew for each test would take most of the time
    for path, value in (text.split("=") for text in overrides):
        *nodes, name = path.split(".")
        node = reduce(getattr, nodes, cfg)
        assert hasattr(node, name)
        setattr(node, name, literal_eval(value) if value[0] in "0123456789TF" else value)
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm1nv"), MaskedSamples)
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=ranks)
    data.trainer = SimpleNamespace(strategy=strategy, lightning_module=SimpleNamespace(position=Position()))
    return data


def layout(ranks: int, micro: int, accumulate: int, *more: str) -> list[SequenceData]:
    options = [f"model.micro_batch_size={micro}", f"trainer.accumulate_grad_batches={accumulate}", *more]
    return [sequence_data(*options, rank=rank, ranks=ranks) for rank in range(ranks)]


Sequence = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def sequences(batch: PackedBatch) -> list[Sequence]:
    """Of each sequence: its tokens, where it is asked and what, and the key of its dropout."""
    found, end = [], 0
    for length, key in zip(batch.lengths, batch.segment_keys.tolist(), strict=False):  # the last is the filler's
        start, end = end, end + length
        here = (batch.target_index >= start) & (batch.target_index < end)
        tokens, index, answers = batch.tokens[start:end], batch.target_index[here] - start, batch.target_ids[here]
        found.append((tuple(tokens.tolist()), tuple(index.tolist()), tuple(answers.tolist()), key))
    return found


def in_step(steps: tuple[TrainStep, ...]) -> Counter[Sequence]:
    """All sequences of a step, whoever computes them."""
    return Counter(sequence for step in steps for batch in step.micro_batches for sequence in sequences(batch))


def whole_steps(data: list[SequenceData], number: int) -> list[tuple[Counter[Sequence], Position]]:
    """The first steps, put together from all ranks, and where the data stands after each."""
    steps = zip(*(islice(rank.train_dataloader(), number) for rank in data), strict=True)
    found = []
    for step in steps:
        assert len({part.after for part in step}) == 1
        found.append((in_step(step), step[0].after))
    return found


def records_of(data: SequenceData) -> Counter[str]:
    """Sequences of the validation set, as text."""
    source = data.samples("val").residues.split.source
    return Counter(source.text(record) for record in range(len(source)))


def plain(batch: PackedBatch) -> list[str]:
    """The sequences of a batch as text, answers put back."""
    tokens = batch.tokens.long()
    tokens[batch.target_index] = batch.target_ids
    pieces = tokens[: batch.num_tokens].split(batch.lengths)
    return [load_tokenizer("esm1nv").decode(piece[1:-1].numpy()) for piece in pieces]


@pytest.fixture(scope="module")
def reference() -> list[tuple[Counter[Sequence], Position]]:
    """Twelve steps of twelve rows by one process: almost two windows and more than an epoch."""
    return whole_steps(layout(1, 12, 1), 12)


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulate"), [(1, 1, 12), (1, 3, 4), (2, 6, 1), (2, 1, 6), (4, 3, 1), (3, 2, 2)]
)
def test_ranks_and_micro_batches_only_deal_out_the_same_step(
    ranks: int, micro: int, accumulate: int, reference: list[tuple[Counter[Sequence], Position]]
) -> None:
    assert reference[-1][1].consumed_samples > 150
    assert whole_steps(layout(ranks, micro, accumulate), 12) == reference


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_take_turns(workers: int, reference: list[tuple[Counter[Sequence], Position]]) -> None:
    assert whole_steps(layout(1, 12, 1, f"model.data.train.num_workers={workers}"), 12) == reference


def test_workers_that_shared_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way through its queues torch leaves a loader that cannot be cleaned up."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing, "Event", full)
    with pytest.raises(UserError, match=r"workers need semaphores in /dev/shm \(No space left on device\): "):
        iter(sequence_data("model.data.train.num_workers=2").train_dataloader())
    iter(sequence_data("model.data.train.num_workers=0").train_dataloader())


def test_ranks_micro_batches_and_workers_together(reference: list[tuple[Counter[Sequence], Position]]) -> None:
    assert whole_steps(layout(2, 3, 2, "model.data.train.num_workers=2"), 12) == reference


def test_micro_batches_have_their_rows_and_no_more() -> None:
    for step in islice(layout(1, 3, 2)[0].train_dataloader(), 20):
        assert len(step.micro_batches) == 2
        for batch in step.micro_batches:
            assert len(batch.tokens) == 3 * 64
            assert all(length <= 64 for length in batch.lengths)


def equal(one: TrainStep, other: TrainStep) -> bool:
    def values(step: TrainStep) -> list[object]:
        flat = [value for batch in step.micro_batches for value in vars(batch).values()]
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in flat]

    return values(one) == values(other) and one.after == other.after


@pytest.mark.parametrize(("done", "workers"), [(1, 0), (7, 0), (20, 0), (7, 2)])
def test_resuming_gives_the_steps_that_were_left(done: int, workers: int) -> None:
    options = ["model.micro_batch_size=4", "trainer.accumulate_grad_batches=2"]
    straight = list(islice(sequence_data(*options).train_dataloader(), 30))
    stopped = sequence_data(*options)
    stopped.trainer.lightning_module.position = straight[done - 1].after
    resumed = sequence_data(*options, f"model.data.train.num_workers={workers}")
    resumed.load_state_dict(pickle.loads(pickle.dumps(stopped.state_dict())))
    assert resumed.trainer.lightning_module.position == straight[done - 1].after
    left = list(islice(resumed.train_dataloader(), 30 - done))
    assert all(map(equal, left, straight[done:]))
    assert len(left) == 30 - done


@pytest.mark.parametrize(("packing", "window", "workers"), [(True, 64, 0), (False, 64, 0), (True, 40, 3)])
def test_a_finite_stream_ends_where_it_should(packing: bool, window: int, workers: int) -> None:
    options = ["trainer.max_epochs=2", f"model.data.packing={packing}", f"model.data.packing_window={window}",
               f"model.data.train.num_workers={workers}", "model.data.long_sequences=truncate"]  # fmt: skip
    data = layout(2, 2, 2, *options)
    source = data[0].samples("train").residues.split.source
    expected = Counter(source.text(record)[:62] for record in range(150))
    every = [list(rank.train_dataloader()) for rank in data]
    assert len(every[0]) == len(every[1])
    seen = Counter(text for rank in every for step in rank for batch in step.micro_batches for text in plain(batch))
    assert seen == Counter({text: 2 * count for text, count in expected.items()})
    assert every[0][-1].after.consumed_samples == 300

    full = [list(rank.train_dataloader()) for rank in layout(2, 2, 2, *options, "model.data.drop_last=True")]
    assert len(full[0]) in (len(every[0]) - 1, len(every[0]))
    assert all(batch.num_tokens for rank in full for step in rank for batch in step.micro_batches)
    assert all(map(equal, full[0], every[0]))


def test_epochs_differ_in_masks_and_crops() -> None:
    data = sequence_data("trainer.max_epochs=2", "model.data.packing=False", "model.micro_batch_size=150")
    first, second = (next(map(plain, step.micro_batches)) for step in data.train_dataloader())
    texts = [data.samples("train").residues.split.source.text(record) for record in range(150)]
    assert all(len(text) <= 62 for text in first + second)
    short = {text for text in texts if len(text) <= 62}
    assert short <= set(first) & set(second)
    crops = len(set(first) - short), len(set(second) - short)
    assert len((set(first) & set(second)) - short) < 0.4 * min(crops)  # some 15 windows each, on average


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("packing", [True, False])
def test_a_tiny_validation_set_is_gone_through_whole(ranks: int, number: int, packing: bool) -> None:
    options = [f"model.data.mock.num_validation_sequences={number}", "model.data.mock.max_length=60",
               f"model.data.packing={packing}", "model.data.drop_last=True"]  # fmt: skip
    data = layout(ranks, 4, 2, *options)
    every = [list(rank.val_dataloader()) for rank in data]
    assert len({len(steps) for steps in every}) == 1  # no rank waits for another
    batches = [batch for steps in every for step in steps for batch in step.micro_batches]
    assert all(len(batch.tokens) == 4 * 64 for batch in batches)
    assert Counter(text for batch in batches for text in plain(batch)) == records_of(data[0])
    again = [batch for rank in data for step in rank.val_dataloader() for batch in step.micro_batches]
    assert list(map(sequences, again)) == list(map(sequences, batches))


def test_a_step_travels_between_processes_as_it_is() -> None:
    step = next(iter(layout(1, 4, 2)[0].train_dataloader()))
    there = pickle.dumps(step)
    assert equal(pickle.loads(there), step)
    assert len(there) < 3 * 2 * 4 * 64 + 8000  # a byte a token and the targets, not six tensors


def test_building_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = layout(1, 4, 2)[0]
    ahead = list(islice(data.train_dataloader(), 40))
    monkeypatch.setattr("bionemo.data.data_module._AT_ONCE", 1)
    assert all(map(equal, ahead, islice(data.train_dataloader(), 40)))
    steps = data.steps("train", True, None, 2, ahead[9].after)
    assert isinstance(steps, Steps)
    assert equal(next(iter(steps)), ahead[10])


def test_lengths_stay_small() -> None:
    lengths = sequence_data().steps("train", True, None, 1, Position()).sampler.lengths
    assert lengths.dtype == np.int32  # hundreds of millions of them
    assert lengths.max() == 64


def test_another_stream_is_not_entered_in_the_middle_of_a_window(caplog: pytest.LogCaptureFixture) -> None:
    stopped = sequence_data()
    stopped.trainer.lightning_module.position = Position(window=3, row=7, consumed_samples=50, consumed_tokens=900)
    resumed = sequence_data("model.data.packing_window=32")
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.position == Position(window=4, row=0, consumed_samples=50, consumed_tokens=900)
    assert "packing_window" in caplog.text


def test_a_split_may_have_a_seed_of_its_own() -> None:
    first = next(iter(sequence_data().train_dataloader()))
    same = next(iter(sequence_data("model.data.val.seed=5").train_dataloader()))
    other = next(iter(sequence_data("model.data.train.seed=5").train_dataloader()))
    assert torch.equal(first.micro_batches[0].tokens, same.micro_batches[0].tokens)
    assert not torch.equal(first.micro_batches[0].tokens, other.micro_batches[0].tokens)


def _collect_in_a_worker(directory: Path) -> None:
    """Leave a process group for the collector, and let it run in a forked process alone."""
    gc.disable()
    dist.init_process_group("gloo", init_method=f"file://{directory / 'rendezvous'}", rank=0, world_size=1)
    garbage: list[object] = [dist.group.WORLD]
    garbage.append(garbage)
    dist.destroy_process_group()
    del garbage
    worker = multiprocessing.get_context("fork").Process(target=gc.collect)
    worker.start()
    worker.join(10)
    worker.kill()
    os._exit(0 if worker.exitcode == 0 else 1)


def test_a_worker_does_not_collect_what_it_has_inherited(tmp_path: Path) -> None:
    process = FORK.Process(target=_collect_in_a_worker, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
