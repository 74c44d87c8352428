# SPDX-License-Identifier: Apache-2.0
"""A training step divides and clips the gradients while it updates, and casts each weight once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.loader import StepBatch
from bionemo.data.sampler import DataPosition
from bionemo.megatron import cpu_attention, groups
from bionemo.megatron.precision import Precision
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from bionemo.training.module import TrainingModule
from tests.support.models import batch_of
from tests.support.runs import MODELS, tiny

EPS = 0.1  # of AdamW: with the default, its first update would not depend on the scale of the gradients


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create process groups of one rank; the kernel of attention does not depend on measured times."""
    monkeypatch.setattr(cpu_attention, "_fastest_kernel", lambda *_: "mkl")
    with groups.simulate(1, 1, 0):
        yield


@cache
def composed() -> RunConfig:
    small = ["model.hidden_dropout=0.0", "model.attention_dropout=0.0", "model.seq_length=96", "model.compile=False",
             "trainer.log_every_n_steps=10", "trainer.gradient_clip_val=null", "model.optim.sched.warmup_steps=0",
             "model.optim.lr=0.01", f"model.optim.eps={EPS}", "model.native_amp_init_scale=1024"]  # fmt: skip
    family = MODELS["esm2nv"]
    return load(family.name, tiny(*small), family.directory / "conf")


class Training:
    """A training module with its optimizer, without a trainer."""

    def __init__(
        self, precision: str, max_norm: float | None = None, sharded: bool = False, recompute: bool = False
    ) -> None:
        cfg = deepcopy(composed())
        cfg.trainer.gradient_clip_val = max_norm
        if sharded:
            cfg.model.optim.name = "distributed_fused_adam"
        if recompute:
            cfg.model.activations_checkpoint_granularity = "full"
            cfg.model.activations_checkpoint_method = "uniform"
        self.build = partial(load_model_class(cfg.model._target_), cfg.model, load_tokenizer("esm2nv"))
        module: Any = TrainingModule(self.build, cfg.model, cfg.trainer, Precision(precision))
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        module._trainer = SimpleNamespace(strategy=strategy, global_step=1, datamodule=SimpleNamespace())
        module.configure_model()
        self.optimizer = module.configure_optimizers()
        module.optimizers = lambda: SimpleNamespace(
            optimizer=self.optimizer, param_groups=self.optimizer.param_groups, step=self.optimizer.step
        )
        self.module, self.model = module, module.model

    def step(self, micro_batches: Sequence[PackedBatch]) -> tuple[float, float]:
        """Make an update; return loss and gradient norm."""
        self.module.training_step(StepBatch(list(micro_batches), DataPosition()))
        loss, norm = self.module.loss_and_norm()
        return loss, norm


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare with a tolerance of 1e-4 of the largest value."""
    error = (found.detach().double() - expected.detach()).abs().max()
    assert error < 1e-4 * expected.abs().max(), float(error)


def batch_with(model: Any, targets: slice, rows: int = 3) -> PackedBatch:
    """Return a batch with some of its target positions."""
    batch = batch_of(model, rows)
    return replace(batch, target_positions=batch.target_positions[targets], target_ids=batch.target_ids[targets])


class Plain:
    """The same model with AdamW in double precision; divides and clips the gradients in separate passes."""

    def __init__(self, training: Training) -> None:
        self.model = training.build()
        self.model.load_state_dict(training.model.state_dict())
        self.exact = [nn.Parameter(each.detach().double()) for each in self.model.parameters()]
        decay = training.module.config.optim.weight_decay
        options = [{"params": [each], "weight_decay": decay * (each.dim() > 1)} for each in self.exact]
        betas = training.module.config.optim.betas
        self.optimizer = torch.optim.AdamW(options, betas=tuple(betas), eps=EPS, foreach=False)

    def step(self, micro_batches: Sequence[PackedBatch], max_norm: float | None, rate: float) -> tuple[float, float]:
        """Make an update; return loss and gradient norm."""
        self.model.zero_grad()
        total, count = torch.zeros(()), 0
        for batch in micro_batches:
            total = total + F.cross_entropy(self.model(batch), batch.target_ids, reduction="sum")
            count += len(batch.target_ids)
        total.backward()
        for exact, parameter in zip(self.exact, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            exact.grad = parameter.grad.double() / max(count, 1)
        norm = torch.nn.utils.clip_grad_norm_(self.exact, float("inf") if max_norm is None else max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            for exact, parameter in zip(self.exact, self.model.parameters(), strict=True):
                parameter.copy_(exact)
        return float(total) / max(count, 1), float(norm)


@pytest.mark.parametrize(
    ("max_norm", "scaled", "sharded"),
    [
        (None, False, False),
        (0.1, False, False),
        (100.0, False, False),
        (0.1, True, False),
        (0.1, False, True),
    ],
    ids=["mean", "clipped", "not-clipped", "clipped-scaled", "clipped-sharded"],
)
def test_the_update_equals_one_of_mean_and_clipped_gradients(
    monkeypatch: pytest.MonkeyPatch, max_norm: float | None, scaled: bool, sharded: bool
) -> None:
    """Micro-batches with 239, 5 and 0 targets: every target has the same weight."""
    monkeypatch.setattr(Precision, "needs_scaling", property(lambda self: scaled))
    training = Training("32", max_norm, sharded)
    plain = Plain(training)
    batches = [batch_with(training.model, slice(n)) for n in (None, 5, 0)]
    index = {each: number for number, each in enumerate(training.model.parameters())}
    for number in range(3):
        loss, norm = training.step(batches)
        exact_step = plain.step(batches, max_norm, training.module.schedule(number))
        assert (loss, norm) == pytest.approx(exact_step, rel=1e-5)
        assert 0.2 < norm < 100
        for each in training.module.parallel.optimizer_shards:
            exact = plain.exact[index[each.model_parameter]]
            state, exact_state = training.optimizer.state[each.parameter], plain.optimizer.state[exact]
            pairs = [(each.parameter, exact), *((state[key], exact_state[key]) for key in ("exp_avg", "exp_avg_sq"))]
            for found, expected in pairs:
                assert_close(found.flatten(), expected.flatten()[each.start : each.start + len(found.flatten())])


def test_a_step_without_targets_only_decays_the_weights() -> None:
    training = Training("32", max_norm=0.1)
    decay = training.module.config.optim.weight_decay
    assert decay == 0.01
    before = {name: each.detach().clone() for name, each in training.model.named_parameters()}
    assert training.step(2 * [batch_with(training.model, slice(0))]) == (0, 0)
    for name, weight in training.model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] * (1 - 0.01 * decay * (weight.dim() > 1)))


class Casts(TorchDispatchMode):
    """Counts the casts of each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {each.data_ptr(): name for name, each in model.named_parameters()}
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.counts[self.names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "number"), [(False, 1), (True, 6)], ids=["kept", "recomputed"])
def test_weights_are_cast_once_per_step(recompute: bool, number: int) -> None:
    """With recomputation, in the forward and in the backward pass of each of three micro-batches."""
    training = Training("bf16-mixed", recompute=recompute)
    batches = 3 * [batch_of(training.model, 3)]
    for _ in range(2):
        with Casts(training.model) as casts:
            training.step(batches)
        layers = {name: count for name, count in casts.counts.items() if "layers" in name and "linear" in name}
        assert len(layers) >= 2 * 4
        assert set(layers.values()) == {number}


def test_a_step_uses_the_weights_of_the_last_update() -> None:
    training = Training("bf16-mixed")
    batches = 2 * [batch_of(training.model, 3)]
    losses = []
    for _ in range(3):
        weights = deepcopy(training.model.state_dict())
        losses.append(training.step(batches)[0])
        other = Training("bf16-mixed")
        other.model.load_state_dict(weights)
        assert other.step(batches)[0] == losses[-1]
        assert all(each.parameter.grad is None for each in training.module.parallel.optimizer_shards)
    assert losses[0] > losses[1] > losses[2]


def test_a_trial_of_a_micro_batch_changes_no_step() -> None:
    """It computes the gradient in the buffers, which a step resets, and leaves the weights and totals unchanged."""
    losses: list[tuple[float, float]] = []
    weights: list[list[Tensor]] = []
    for trial in (False, True):
        training = Training("32")
        batch = batch_of(training.model, 3)
        if trial:
            training.module.parallel.try_micro_batch(batch)
            assert any(each.gradient.any() for each in training.module.parallel.optimizer_shards)
        losses += [training.step([batch]) for _ in range(2)]
        weights.append([each.detach() for each in training.model.parameters()])
    assert losses[:2] == losses[2:]
    assert all(map(torch.equal, *weights))
