# SPDX-License-Identifier: Apache-2.0
"""Trial of a micro-batch: smaller ones after torch.OutOfMemoryError, and no effect on the training."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bionemo.common.errors import RankError
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.data_module import SequenceData
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.data.sampler import DataPosition
from bionemo.megatron.groups import simulate
from bionemo.megatron.precision import Precision
from bionemo.megatron.train_step import ParallelModel
from bionemo.tokenizers import load_tokenizer
from bionemo.training.micro_batches import fit_micro_batches
from bionemo.training.module import TrainingModule
from tests.planning import simulated_rank
from tests.planning.storage_meter import StorageMeter
from tests.support.runs import config, fingerprint, logged, train

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LENGTH = 64  # tokens of a row
PARAMETERS = 1000


@cache
def composed() -> RunConfig:
    return config(Path("unused"), "model.micro_batch_size=auto", "model.compile=False")


def sequence_data(size: int, count: int = 1, position: DataPosition | None = None) -> SequenceData:
    cfg = composed()
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm2nv"), MaskedDataset, MicroBatches(size, count))
    data.position = position or data.position
    return data


class SimulatedMemory:
    """Stands for a ParallelModel on a GPU whose memory holds `rows` rows.

    Attributes:
        tried: number of rows of each trial.
        batches: micro-batches of the trials.
        reserved: bytes allocated before each trial.
    """

    def __init__(self, rows: int, meter: StorageMeter | None = None) -> None:
        shard = SimpleNamespace(gradient=torch.zeros(PARAMETERS // 2))
        self.optimizer_shards: list[Any] = [shard, shard]
        self.tried: list[int] = []
        self.batches: list[PackedBatch] = []
        self.reserved: list[int] = []
        self._rows, self._meter = rows, meter

    def try_micro_batch(self, batch: PackedBatch) -> None:
        self.batches.append(batch)
        self.tried.append(len(batch.tokens) // LENGTH)
        if self._meter is not None:
            self.reserved.append(self._meter.now)
        if self.tried[-1] > self._rows:
            raise torch.OutOfMemoryError("CUDA out of memory")


def random_states() -> list[str]:
    """Return the states of the global random generators."""
    return [
        str(random.getstate()),
        str(np.random.get_state(legacy=False)),
        torch.get_rng_state().numpy().tobytes().hex(),
    ]


def confirm(memory: Any, data: SequenceData) -> MicroBatches:
    return fit_micro_batches(memory, data, CPU)


def test_a_run_without_further_steps_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data, memory = sequence_data(8), SimulatedMemory(rows=1)
    monkeypatch.setattr(data, "training_steps", lambda micro_batches: iter(()))
    assert confirm(memory, data) == data.micro_batches
    assert memory.tried == []


@pytest.mark.parametrize(
    ("given", "rows", "tried", "expected"),
    [
        ((8, 1), 8, [8], (8, 1)),
        ((8, 1), 7, [8, 4], (4, 2)),
        ((8, 3), 1, [8, 4, 2, 1], (1, 24)),
        ((6, 1), 2, [6, 3, 1], (1, 6)),
        ((7, 2), 2, [7, 2], (2, 7)),  # 3 does not divide 14
    ],
)
def test_the_size_is_halved_until_it_fits(
    given: tuple[int, int], rows: int, tried: list[int], expected: tuple[int, int]
) -> None:
    memory, data = SimulatedMemory(rows), sequence_data(*given)
    assert confirm(memory, data) == MicroBatches(*expected)
    assert memory.tried == tried


def test_a_single_row_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(RankError) as caught:
        confirm(SimulatedMemory(0), sequence_data(4))
    assert str(caught.value) == (
        "the GPU has not enough memory for a micro-batch of one row: choose a parallel layout that fits "
        "(`bionemo plan` estimates its memory), or end other programs that use the GPU"
    )


def test_other_errors_are_not_caught() -> None:
    memory = SimulatedMemory(8)
    memory.optimizer_shards = [SimpleNamespace()]
    with pytest.raises(AttributeError):
        confirm(memory, sequence_data(4))


def test_a_trial_uses_the_next_rows_and_does_not_consume_them() -> None:
    position = DataPosition(window_start=2048, row=5, consumed_samples=70, consumed_tokens=900)
    memory, data = SimulatedMemory(2), sequence_data(4, 2, position)
    before = random_states()
    confirm(memory, data)
    assert random_states() == before
    assert (data.position, data.micro_batches) == (position, MicroBatches(4, 2))
    step = next(iter(data.training_steps()))
    assert torch.equal(memory.batches[0].tokens, step.micro_batches[0].tokens)
    assert torch.equal(memory.batches[1].tokens, step.micro_batches[0].tokens[: 2 * LENGTH])
    assert step.next_position.consumed_samples > 70


def test_a_trial_reserves_memory_for_the_optimizer_state() -> None:
    """AdamW has two fp32 moments for each of the process's parameters."""
    with StorageMeter() as meter:
        memory = SimulatedMemory(1, meter)
        before = meter.now
        confirm(memory, sequence_data(2))
        assert all(reserved - before >= 8 * PARAMETERS for reserved in memory.reserved)
        memory.batches.clear()
        assert meter.now - before < 8 * PARAMETERS
    assert len(memory.reserved) == 2


def test_optimizer_state_that_does_not_fit_is_an_error() -> None:
    def numel() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory = SimulatedMemory(8)
    memory.optimizer_shards = [SimpleNamespace(gradient=SimpleNamespace(numel=numel))]
    with pytest.raises(RankError, match="one row"):
        confirm(memory, sequence_data(4))
    assert memory.tried == []


# the module: which runs have a trial, and what it changes


class Module:
    """A TrainingModule that seems to train on `device`; attribute `module`.

    Args:
        memory: number of rows that fit; None: a trial is an error.
        micro_batches: micro-batches to try.
        device: device of the trainer.
        smallest: smallest number of rows of the other ranks.
        changes: keys of the model.
    """

    def __init__(
        self, memory: int | None, micro_batches: tuple[int, int], device: torch.device = GPU, smallest: int = 99,
        **changes: Any,
    ) -> None:  # fmt: skip
        def reduce(value: Tensor, reduce_op: str) -> Tensor:
            assert reduce_op == "min"
            return value.clamp(max=smallest)

        cfg = composed()
        model = replace(cfg.model, **changes)
        self.module = TrainingModule(lambda: None, model, cfg.trainer, Precision("32"))  # type: ignore[arg-type, return-value]
        self.data = sequence_data(*micro_batches)
        strategy = SimpleNamespace(root_device=device, reduce=reduce)
        self.trainer = SimpleNamespace(strategy=strategy, datamodule=self.data)
        self.module.trainer = self.trainer  # type: ignore[assignment]
        self.memory = SimulatedMemory(memory or 0)
        self.module.parallel = self.memory if memory is not None else None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("device", "changes"),
    [(CPU, {}), (GPU, {"micro_batch_size": 8}), (GPU, {"tensor_model_parallel_size": 2})],
    ids=["on a CPU", "with an explicit size", "with model parallelism"],
)
def test_runs_without_trial(device: torch.device, changes: dict[str, Any]) -> None:
    run = Module(None, (8, 1), device, **changes)
    run.module.on_fit_start()
    assert run.data.micro_batches == MicroBatches(8, 1)


@pytest.mark.parametrize(
    ("rows", "others", "expected"), [(8, 99, (8, 1)), (4, 99, (4, 2)), (8, 2, (2, 4)), (2, 5, (2, 4))]
)
def test_all_ranks_use_the_smallest_size(
    caplog: pytest.LogCaptureFixture, rows: int, others: int, expected: tuple[int, int]
) -> None:
    run = Module(rows, (8, 1), smallest=others)
    run.module.on_fit_start()
    assert run.data.micro_batches == MicroBatches(*expected)
    size, count = expected
    assert caplog.messages[-1] == (f"micro-batches of {size} rows, {count} per step (model.micro_batch_size=auto)")


# complete runs: the backward pass raises the error when it has computed most gradients


class Held:
    """Stands for the tensors that the functions of a failed pass hold while its exception exists."""


def fail_in_backward(layer: torch.nn.Module, inputs: tuple[Tensor, ...], held: WeakSet[Held] | None = None) -> None:
    """Let the backward pass fail where it leaves a layer; a forward pre-hook."""

    def fail(gradient: Tensor) -> None:
        tensors = Held()
        if held is not None:
            held.add(tensors)
        raise torch.OutOfMemoryError("CUDA out of memory")

    inputs[0].register_hook(fail)


class Watch:
    """What the first layer of a model has seen.

    Attributes:
        rows: number of rows of each micro-batch of the training.
        leaked: number of failed passes whose tensors exist when another pass begins.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.leaked = 0
        self.held: WeakSet[Held] = WeakSet()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watch]:
    """Return a function that simulates a GPU: the backward pass of more than `rows` rows fails."""

    def limit(rows: int) -> Watch:
        watch, configure = Watch(), TrainingModule.configure_model

        def configure_limited(self: TrainingModule) -> None:
            configure(self)
            assert self.model is not None
            self.model.blocks()[0].layers[0].register_forward_pre_hook(enter)

        def enter(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not layer.training:
                return
            watch.leaked += len(watch.held)
            watch.rows.append(len(inputs[0]) // LENGTH)
            if watch.rows[-1] > rows:
                fail_in_backward(layer, inputs, watch.held)

        monkeypatch.setattr(TrainingModule, "configure_model", configure_limited)
        monkeypatch.setattr(TrainingModule, "on_gpu", True)
        monkeypatch.setattr(TrainingModule, "_peak_flops", None)  # of a GPU that is not there
        return watch

    return limit


ROWS = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "model.compile=False", "trainer.max_steps=4"]


@pytest.mark.parametrize("optimizer", [pytest.param("fused_adam", marks=pytest.mark.slow), "distributed_fused_adam"])
def test_a_trial_does_not_change_the_run(tmp_path: Path, limited: Callable[..., Watch], optimizer: str) -> None:
    """Weights, optimizer state, data position and losses are bitwise those of a run with the size that fits."""
    overrides = [*ROWS, f"model.optim.name={optimizer}"]
    train(config(tmp_path / "given", *overrides, "model.micro_batch_size=4", "trainer.accumulate_grad_batches=2"))
    watch = limited(rows=5)
    train(config(tmp_path / "tried", *overrides, "model.micro_batch_size=auto", "model.replica_batch_size=8"))
    assert watch.rows == [8, 4, *[4, 4] * 4]
    assert watch.leaked == 0
    (log,) = (tmp_path / "tried").glob("nemo_log_*.txt")
    assert log.read_text().count("micro-batches of 4 rows, 2 per step") == 1
    assert fingerprint(tmp_path / "tried") == fingerprint(tmp_path / "given")
    for metric in ("reduced_train_loss", "grad_norm", "val_loss"):
        assert logged(tmp_path / "tried", metric) == logged(tmp_path / "given", metric)


# the pass of a trial


@contextmanager
def parallel_model(half: bool = False) -> Iterator[tuple[ParallelModel, PackedBatch]]:
    """Yield a model with dropout on one of two simulated replicas, and a micro-batch."""
    cfg = simulated_rank.config("esm1nv", 2, num_layers=2)
    with simulate(1, 1, 0, data=2):
        model = simulated_rank.build(cfg).train()
        model.initialize_weights(1)
        autocast = partial(simulated_rank.cast, half)
        yield ParallelModel(model, autocast), simulated_rank.batch(cfg)


class Communications(TorchDispatchMode):
    """Counts the collective operations; attribute `count`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))


def communications(function: Callable[[], object]) -> int:
    with Communications() as counter:
        function()
    return counter.count


def gradients(parallel: ParallelModel) -> list[Tensor]:
    return [each.gradient.clone() for each in parallel.optimizer_shards]


def equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_trial_does_not_communicate() -> None:
    with parallel_model() as (parallel, batch):
        step = partial(parallel.forward_backward, [batch])
        trial = partial(parallel.try_micro_batch, batch)
        assert communications(trial) == 0
        step()
        expected = communications(step)
        assert expected > 0
        parallel.ddp.zero_grad_buffer()  # from here on, a backward pass reduces gradients by itself
        assert communications(trial) == 0
        assert communications(step) == expected


@pytest.mark.parametrize("half", [False, True])
def test_a_trial_needs_the_memory_of_a_step_and_computes_its_gradients(half: bool) -> None:
    with parallel_model(half=half) as (parallel, batch):
        with StorageMeter() as step:
            parallel.forward_backward([batch])
        expected = gradients(parallel)
        parallel.finish_update()
        parallel.ddp.zero_grad_buffer()
        with StorageMeter() as trial:
            parallel.try_micro_batch(batch)
        assert abs(trial.peak - step.peak) < 0.01 * step.peak
        assert equal(gradients(parallel), expected)


def test_trials_do_not_change_weights_and_gradients_of_the_next_step() -> None:
    with parallel_model() as (parallel, batch):
        weights, random_state = [each.clone() for each in parallel.model.parameters()], random_states()
        parallel.forward_backward([batch] * 2)
        expected = gradients(parallel)
        parallel.finish_update()
        hook = parallel.model.blocks()[0].layers[0].register_forward_pre_hook(fail_in_backward)
        with pytest.raises(torch.OutOfMemoryError):
            parallel.try_micro_batch(batch)
        hook.remove()
        parallel.try_micro_batch(batch)
        assert all(parameter.grad is None for parameter in parallel.model.parameters())
        assert not equal(gradients(parallel), expected)
        parallel.forward_backward([batch] * 2)
        assert equal(gradients(parallel), expected)
        assert equal(parallel.model.parameters(), weights)
        assert random_states() == random_state
