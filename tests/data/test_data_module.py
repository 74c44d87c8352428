# SPDX-License-Identifier: Apache-2.0
"""Training data does not depend on workers, ranks or micro-batches, and resuming omits no sequence."""

import errno
import gc
import multiprocessing
import os
import pickle
from ast import literal_eval
from collections import Counter
from copy import deepcopy
from dataclasses import replace
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
from bionemo.config.micro_batches import MicroBatches, divide_batch
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.data_module import SequenceData
from bionemo.data.loader import StepBatch, StepDataset, _unpack
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.data.sampler import DataPosition
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.support.runs import FORK

BASE = [
    "data=mock", "model.seq_length=64", "model.data.mock.num_sequences=150", "model.data.mock.min_length=5",
    "model.data.mock.max_length=90", "model.data.packing_window=64", "model.data.num_workers=0", "model.seed=11",
]  # fmt: skip


@cache
def composed() -> RunConfig:
    return load("pretrain_small", BASE, EXAMPLES / "esm1nv" / "conf")


def sequence_data(*overrides: str, rank: int = 0, ranks: int = 1) -> SequenceData:
    cfg = deepcopy(composed())  # composing for each test would take most of the time
    for path, value in (text.split("=") for text in overrides):
        *nodes, name = path.split(".")
        node = reduce(getattr, nodes, cfg)
        assert hasattr(node, name)
        setattr(node, name, literal_eval(value) if value[0] in "0123456789TF" else value)
    micro_batches = divide_batch(cfg.model, cfg.trainer, ranks, on_gpu=False)
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm1nv"), MaskedDataset, micro_batches)
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=ranks)
    data.trainer = SimpleNamespace(strategy=strategy, training=True)
    return data


def layout(ranks: int, micro: int, accumulate: int, *more: str) -> list[SequenceData]:
    options = [f"model.micro_batch_size={micro}", f"trainer.accumulate_grad_batches={accumulate}", *more]
    return [sequence_data(*options, rank=rank, ranks=ranks) for rank in range(ranks)]


Sequence = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def sequences(batch: PackedBatch) -> list[Sequence]:
    """Return tokens, target positions, target ids and dropout key of each sequence."""
    found, end = [], 0
    for length, key in zip(batch.lengths, batch.dropout_keys.tolist(), strict=False):  # the last key is for padding
        start, end = end, end + length
        here = (batch.target_positions >= start) & (batch.target_positions < end)
        tokens, index, answers = batch.tokens[start:end], batch.target_positions[here] - start, batch.target_ids[here]
        found.append((tuple(tokens.tolist()), tuple(index.tolist()), tuple(answers.tolist()), key))
    return found


def in_step(steps: tuple[StepBatch, ...]) -> Counter[Sequence]:
    """Return all sequences of a step, from all ranks."""
    return Counter(sequence for step in steps for batch in step.micro_batches for sequence in sequences(batch))


def whole_steps(data: list[SequenceData], number: int) -> list[tuple[Counter[Sequence], DataPosition]]:
    """Return the first steps of all ranks together, and the position after each."""
    steps = zip(*(islice(rank.train_dataloader(), number) for rank in data), strict=True)
    found = []
    for step in steps:
        assert len({part.next_position for part in step}) == 1
        found.append((in_step(step), step[0].next_position))
    return found


def records_of(data: SequenceData) -> Counter[str]:
    """Return the texts of the validation set."""
    source = data.dataset("val").split.source
    return Counter(source.text(record) for record in range(len(source)))


def plain(batch: PackedBatch) -> list[str]:
    """Return the texts of a batch, with masks replaced by the targets."""
    tokens = batch.tokens.long()
    tokens[batch.target_positions] = batch.target_ids
    pieces = tokens[: batch.num_tokens].split(batch.lengths)
    return [load_tokenizer("esm1nv").decode(piece[1:-1].numpy()) for piece in pieces]


@pytest.fixture(scope="module")
def reference() -> list[tuple[Counter[Sequence], DataPosition]]:
    """Compute twelve steps of twelve packed sequences in one process: almost two windows and more than an epoch."""
    return whole_steps(layout(1, 12, 1), 12)


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulate"), [(1, 1, 12), (1, 3, 4), (2, 6, 1), (2, 1, 6), (4, 3, 1), (3, 2, 2)]
)
def test_ranks_and_micro_batches_divide_the_same_steps(
    ranks: int, micro: int, accumulate: int, reference: list[tuple[Counter[Sequence], DataPosition]]
) -> None:
    assert reference[-1][1].consumed_samples > 150
    assert whole_steps(layout(ranks, micro, accumulate), 12) == reference


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_order_does_not_depend_on_the_number_of_workers(
    workers: int, reference: list[tuple[Counter[Sequence], DataPosition]]
) -> None:
    assert whole_steps(layout(1, 12, 1, f"model.data.train.num_workers={workers}"), 12) == reference


def test_too_little_shared_memory_for_workers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would leave a loader that cannot be cleaned up."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing, "Event", full)
    with pytest.raises(UserError, match=r"workers need semaphores in /dev/shm \(No space left on device\): "):
        iter(sequence_data("model.data.train.num_workers=2").train_dataloader())
    iter(sequence_data("model.data.train.num_workers=0").train_dataloader())


def test_ranks_micro_batches_and_workers_together(reference: list[tuple[Counter[Sequence], DataPosition]]) -> None:
    assert whole_steps(layout(2, 3, 2, "model.data.train.num_workers=2"), 12) == reference


def test_micro_batches_have_the_configured_size() -> None:
    for step in islice(layout(1, 3, 2)[0].train_dataloader(), 20):
        assert len(step.micro_batches) == 2
        for batch in step.micro_batches:
            assert len(batch.tokens) == 3 * 64
            assert all(length <= 64 for length in batch.lengths)


def equal(one: StepBatch, other: StepBatch) -> bool:
    def values(step: StepBatch) -> list[object]:
        flat = [value for batch in step.micro_batches for value in vars(batch).values()]
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in flat]

    return values(one) == values(other) and one.next_position == other.next_position


@pytest.mark.parametrize(("done", "workers"), [(1, 0), (7, 0), (20, 0), (7, 2)])
def test_resuming_yields_the_remaining_steps(done: int, workers: int) -> None:
    options = ["model.micro_batch_size=4", "trainer.accumulate_grad_batches=2"]
    straight = list(islice(sequence_data(*options).train_dataloader(), 30))
    stopped = sequence_data(*options)
    stopped.position = straight[done - 1].next_position
    resumed = sequence_data(*options, f"model.data.train.num_workers={workers}")
    resumed.load_state_dict(pickle.loads(pickle.dumps(stopped.state_dict())))
    assert resumed.position == straight[done - 1].next_position
    left = list(islice(resumed.train_dataloader(), 30 - done))
    assert all(map(equal, left, straight[done:]))
    assert len(left) == 30 - done


@pytest.mark.parametrize(("packing", "window", "workers"), [(True, 64, 0), (False, 64, 0), (True, 40, 3)])
def test_a_finite_stream_contains_every_record_in_every_epoch(packing: bool, window: int, workers: int) -> None:
    options = ["trainer.max_epochs=2", f"model.data.packing={packing}", f"model.data.packing_window={window}",
               f"model.data.train.num_workers={workers}", "model.data.long_sequences=truncate"]  # fmt: skip
    data = layout(2, 2, 2, *options)
    source = data[0].dataset("train").split.source
    expected = Counter(source.text(record)[:62] for record in range(150))
    every = [list(rank.train_dataloader()) for rank in data]
    assert len(every[0]) == len(every[1])
    seen = Counter(text for rank in every for step in rank for batch in step.micro_batches for text in plain(batch))
    assert seen == Counter({text: 2 * count for text, count in expected.items()})
    assert every[0][-1].next_position.consumed_samples == 300

    full = [list(rank.train_dataloader()) for rank in layout(2, 2, 2, *options, "model.data.drop_last=True")]
    assert len(full[0]) in (len(every[0]) - 1, len(every[0]))
    assert all(batch.num_tokens for rank in full for step in rank for batch in step.micro_batches)
    assert all(map(equal, full[0], every[0]))


def test_epochs_differ_in_masks_and_crops() -> None:
    data = sequence_data("trainer.max_epochs=2", "model.data.packing=False", "model.micro_batch_size=150")
    first, second = (next(map(plain, step.micro_batches)) for step in data.train_dataloader())
    texts = [data.dataset("train").split.source.text(record) for record in range(150)]
    assert all(len(text) <= 62 for text in first + second)
    short = {text for text in texts if len(text) <= 62}
    assert short <= set(first) & set(second)
    crops = len(set(first) - short), len(set(second) - short)
    assert len((set(first) & set(second)) - short) < 0.4 * min(crops)  # about 15 windows each


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("packing", [True, False])
def test_a_tiny_validation_set_is_read_completely(ranks: int, number: int, packing: bool) -> None:
    options = [f"model.data.mock.num_validation_sequences={number}", "model.data.mock.max_length=60",
               f"model.data.packing={packing}", "model.data.drop_last=True"]  # fmt: skip
    data = layout(ranks, 4, 2, *options)
    every = [list(rank.val_dataloader()[0]) for rank in data]
    assert len({len(steps) for steps in every}) == 1  # otherwise a rank would wait forever
    batches = [batch for steps in every for step in steps for batch in step.micro_batches]
    assert all(len(batch.tokens) == 4 * 64 for batch in batches)
    assert Counter(text for batch in batches for text in plain(batch)) == records_of(data[0])
    again = [batch for rank in data for step in rank.val_dataloader()[0] for batch in step.micro_batches]
    assert list(map(sequences, again)) == list(map(sequences, batches))


def test_validation_with_automatic_micro_batches_does_not_depend_on_the_device() -> None:
    """A GPU may have larger micro-batches than a CPU; validation losses must be comparable."""
    validations = []
    for micro_batches in (MicroBatches(32, 1), MicroBatches(8, 4)):
        data = sequence_data("model.micro_batch_size=auto", "model.replica_batch_size=8")
        data.micro_batches = micro_batches
        assert {len(batch.tokens) for batch in next(iter(data.train_dataloader())).micro_batches} == {
            64 * micro_batches.size
        }
        validations.append(list(data.val_dataloader()[0]))
        assert {len(batch.tokens) for step in validations[-1] for batch in step.micro_batches} == {64 * 8}
    assert all(map(equal, *validations))


def test_training_steps_with_other_micro_batches_have_the_same_rows() -> None:
    data = layout(1, 4, 2)[0]
    data.position = next(iter(data.train_dataloader())).next_position
    steps = zip(data.training_steps(), data.training_steps(MicroBatches(8, 1)), strict=False)
    for step, other in islice(steps, 3):
        assert (len(step.micro_batches), len(other.micro_batches)) == (2, 1)
        assert in_step((step,)) == in_step((other,))


def test_workers_send_compact_steps() -> None:
    steps = layout(1, 4, 2)[0].train_dataloader().dataset
    assert isinstance(steps, StepDataset)
    compact = next(steps._steps(0, 1))
    sent = pickle.dumps(compact)
    assert equal(_unpack(pickle.loads(sent)), next(iter(steps)))
    assert len(sent) < 3 * 2 * 4 * 64 + 8000  # one byte per token, and the targets


def test_collating_several_steps_per_call_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = layout(1, 4, 2)[0]
    ahead = list(islice(data.train_dataloader(), 40))
    monkeypatch.setattr("bionemo.data.loader._TOKENS_PER_CALL", 1)
    assert all(map(equal, ahead, islice(data.train_dataloader(), 40)))
    steps = data.steps("train", True, None, MicroBatches(4, 2), ahead[9].next_position)
    assert isinstance(steps, StepDataset)
    assert equal(next(iter(steps)), ahead[10])


@pytest.mark.parametrize(("masked", "names"), [(False, {"residue frequencies alone", "best possible"}),
                                               (True, {"residue frequencies alone"})])  # fmt: skip
def test_the_lowest_loss_is_unknown_if_special_tokens_are_masked(masked: bool, names: set[str]) -> None:
    data = sequence_data(f"model.data.mask_special_tokens={masked}")
    data.setup("fit")
    assert data.reference_losses().keys() == names


def test_lengths_have_a_small_type() -> None:
    lengths = sequence_data().training_steps().sampler.lengths
    assert lengths.dtype == np.int32  # there are hundreds of millions of lengths
    assert lengths.max() == 64


@pytest.mark.parametrize("override", ["packing_window=32", "packing=False", "shuffle=False", "train.seed=5"])
def test_a_changed_stream_continues_after_as_many_samples(override: str, caplog: pytest.LogCaptureFixture) -> None:
    stopped = sequence_data("trainer.max_epochs=4")
    steps = list(stopped.train_dataloader())
    stopped.position = steps[3].next_position
    resumed = sequence_data("trainer.max_epochs=4", f"model.data.{override}")
    resumed.load_state_dict(stopped.state_dict())
    used = stopped.position.consumed_samples
    assert resumed.position == DataPosition(used, 0, 0, used, used, stopped.position.consumed_tokens)
    assert override.split("=", maxsplit=1)[0] in caplog.text
    assert f"training continues after {used} samples of epoch 1" in caplog.text
    assert list(resumed.train_dataloader())[-1].next_position.consumed_samples == 600


@pytest.mark.parametrize(("rows", "noted"), [(2, False), (3, True)])
def test_another_number_of_rows_in_a_step_is_noted(rows: int, noted: bool, caplog: pytest.LogCaptureFixture) -> None:
    states = []
    for each in (2, rows):
        data = sequence_data(f"model.replica_batch_size={each}")
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(data_parallel_size=3), training=True)  # type: ignore[assignment]
        data.load_state_dict(states[0]) if states else states.append(data.state_dict())
    assert ("a step has 9 rows, but 6 before" in caplog.text) == noted
    assert ("set model.global_batch_size=6 to train as before" in caplog.text) == noted


@pytest.mark.parametrize("override", ["modify_percent=0.2", "mask_percent=0.9", "mask_special_tokens=True"])
def test_validations_with_other_masks_are_not_compared(override: str) -> None:
    one, same, other = (
        sequence_data(*more).validation_identity(1.0) for more in ((), (), (f"model.data.{override}",))
    )
    assert one == same != other


def test_other_sequences_of_the_same_lengths_are_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice([*"ACDEFGHIKLMNPQRSTVWY"], size)) for size in rng.integers(5, 40, 100)]

    def open_data(texts: list[str]) -> SequenceData:
        for split in ("train", "val"):
            (tmp_path / split).mkdir(exist_ok=True)
            (tmp_path / split / "x000.fasta").write_text("".join(f">p\n{text}\n" for text in texts))
        given = ["data=fasta", *BASE[1:2], *BASE[5:], f"model.data.dataset_path={tmp_path}"]
        cfg = load("pretrain_small", [*given, "model.data.dataset.train=x000", "model.data.dataset.val=x000"],
                   EXAMPLES / "esm1nv" / "conf")  # fmt: skip
        micro_batches = divide_batch(cfg.model, cfg.trainer, 1, on_gpu=False)
        data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm1nv"), MaskedDataset, micro_batches)
        data.trainer = SimpleNamespace(
            strategy=SimpleNamespace(data_parallel_rank=0, data_parallel_size=1), training=True
        )  # type: ignore[assignment]
        return data

    first = open_data(texts)
    state, identity = pickle.loads(pickle.dumps(first.state_dict())), first.validation_identity(1.0)
    again = open_data(texts)
    again.load_state_dict(state)
    assert again.validation_identity(1.0) == identity and "different" not in caplog.text
    reversed_texts = open_data([text[::-1] for text in texts])
    reversed_texts.load_state_dict(state)
    assert "training sequences: different from the checkpoint; " in caplog.text
    assert reversed_texts.validation_identity(1.0) != identity


@pytest.mark.parametrize(("records", "used", "start", "left"), [(151, 200, 201, 403), (40, 200, 80, 80)])
def test_added_and_removed_records_do_not_end_a_run(records: int, used: int, start: int, left: int) -> None:
    """After 200 samples of 4 epochs of 150 records, 50 samples of the second epoch are used."""
    stopped = sequence_data("trainer.max_epochs=4")
    stopped.position = DataPosition(192, 3, 256, used, used, 900)
    resumed = sequence_data("trainer.max_epochs=4", f"model.data.mock.num_sequences={records}")
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.position == DataPosition(start, 0, 0, start, used, 900)
    assert list(resumed.train_dataloader())[-1].next_position.consumed_samples == used + left


@pytest.mark.parametrize(("epochs", "done"), [((1, 3), 99), ((1, 2), 3), ((2, 3), 8)])
def test_more_epochs_use_the_remaining_samples_once(epochs: tuple[int, int], done: int) -> None:
    """The last window of the first run has fewer samples; every record is used once per epoch of the longer run."""
    options = ["model.data.packing_window=64", "model.data.long_sequences=truncate"]
    first = sequence_data(*options, f"trainer.max_epochs={epochs[0]}")
    before = list(islice(first.train_dataloader(), done))
    first.position = before[-1].next_position
    second = sequence_data(*options, f"trainer.max_epochs={epochs[1]}")
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    steps = before + list(second.train_dataloader())
    source = first.dataset("train").split.source
    assert Counter(text for step in steps for batch in step.micro_batches for text in plain(batch)) == {
        text: epochs[1] * count for text, count in Counter(source.text(record)[:62] for record in range(150)).items()
    }
    assert steps[-1].next_position.consumed_samples == 150 * epochs[1]


def test_fewer_epochs_end_after_as_many_samples() -> None:
    first = sequence_data("trainer.max_epochs=3", "model.data.packing_window=400")
    first.position = next(iter(first.train_dataloader())).next_position
    assert first.position.window_end == 400
    second = sequence_data("trainer.max_epochs=1", "model.data.packing_window=400")
    second.load_state_dict(first.state_dict())
    assert list(second.train_dataloader())[-1].next_position.consumed_samples == 150


def test_epochs_without_a_limit() -> None:
    """As in Lightning, -1 is no limit."""
    data = sequence_data("model.data.train.use_upsampling=True")
    for given, expected in ((3, 3), (-1, None), (None, None)):
        data.trainer_config = replace(data.trainer_config, max_epochs=given)
        assert data.training_steps().sampler.stream.epochs == expected


def test_a_split_may_have_its_own_seed() -> None:
    first = next(iter(sequence_data().train_dataloader()))
    same = next(iter(sequence_data("model.data.val.seed=5").train_dataloader()))
    other = next(iter(sequence_data("model.data.train.seed=5").train_dataloader()))
    assert torch.equal(first.micro_batches[0].tokens, same.micro_batches[0].tokens)
    assert not torch.equal(first.micro_batches[0].tokens, other.micro_batches[0].tokens)


def _collect_in_a_worker(directory: Path) -> None:
    """Collect a process group as garbage in a forked process."""
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


@pytest.mark.slow
def test_a_worker_does_not_collect_inherited_garbage(tmp_path: Path) -> None:
    process = FORK.Process(target=_collect_in_a_worker, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
