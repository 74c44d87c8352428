# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, and steps skipped in fp16."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bionemo.megatron import precision
from bionemo.megatron.precision import LossScaler, resolve_precision
from bionemo.training import module as training_module
from bionemo.training.module import TrainingModule
from tests.support.runs import config, logged, train


def test_hysteresis_tolerates_one_overflow_like_v1() -> None:
    scaler = LossScaler(2.0**32, growth_interval=1000, hysteresis=2)
    for _ in range(17):
        scaler.update(overflow=True)
    assert scaler.scale == 2.0**16
    for _ in range(999):
        scaler.update(overflow=False)
    assert scaler.scale == 2.0**16
    scaler.update(overflow=False)
    assert scaler.scale == 2.0**17
    scaler.update(overflow=True)  # tolerated again after growth
    assert scaler.scale == 2.0**17
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**16


def test_an_overflow_delays_growth_and_the_scale_is_at_least_one() -> None:
    scaler = LossScaler(4.0, growth_interval=3, hysteresis=1)
    for overflow in (False, False, True, False, False):
        scaler.update(overflow)
    assert scaler.scale == 2.0
    scaler.update(False)
    assert scaler.scale == 4.0
    for _ in range(10):
        scaler.update(True)
    assert scaler.scale == 1.0


def test_a_scaler_resumes_from_its_state() -> None:
    one, other = LossScaler(2.0**32, 5, 2), LossScaler(1.0, 5, 2)
    pattern = [True, False, False, True, True, False, False, False, False, False, True, True]
    for overflow in pattern[:5]:
        one.update(overflow)
    other.load_state_dict(one.state_dict())
    for overflow in pattern[5:]:
        one.update(overflow)
        other.update(overflow)
        assert one == other


@pytest.mark.parametrize(
    ("given", "with_gpu", "with_bf16", "without"),
    [
        ("16-mixed", "16-mixed", "bf16-mixed", "32"),
        ("16", "16-mixed", "bf16-mixed", "32"),
        ("bf16", "bf16-mixed", "bf16-mixed", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed", "bf16-mixed", "bf16-mixed"),
        ("32", "32", "32", "32"),
        ("32-true", "32", "32", "32"),
    ],
)
def test_the_resolved_precision_depends_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, with_gpu: str, with_bf16: str,
    without: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(precision, "amx_is_broken", lambda: False)
    for gpu, features, expected, noted in (
        (True, {"avx2": True, "avx512_bf16": False}, with_gpu, False),
        (False, {"avx2": True, "avx512_bf16": True}, with_bf16, with_bf16 != with_gpu),
        (False, {"avx2": True, "amx_bf16": True}, with_bf16, with_bf16 != with_gpu),
        (False, {"architecture": "of another kind"}, with_bf16, with_bf16 != with_gpu),
        (False, {"avx2": True, "avx512_bf16": False}, without, not given.startswith("32")),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        caplog.clear()
        assert resolve_precision(given).name == expected
        assert len(caplog.messages) == noted


def test_autocast_formats() -> None:
    x = torch.ones(2, 2)
    for name, dtype in {"32": torch.float32, "bf16-mixed": torch.bfloat16}.items():
        with resolve_precision(name).autocast(torch.device("cpu")):
            assert (x @ x).dtype == dtype


def test_a_skipped_update_advances_the_data_but_not_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 4 overflow: weights and schedule are unchanged, step and sample counters advance."""
    seen: list[tuple[int, int, int, torch.Tensor]] = []
    update = TrainingModule._update

    def watched(self: TrainingModule, optimizer: object, norm: torch.Tensor) -> None:
        if len(seen) + 1 in (3, 4):
            norm = torch.full_like(norm, float("inf"))
            for part in self.parallel.optimizer_shards:
                part.gradient.fill_(float("nan"))
        update(self, optimizer, norm)
        weights = torch.cat([part.parameter.detach().reshape(-1) for part in self.parallel.optimizer_shards])
        samples = self.trainer.datamodule.position.consumed_samples  # type: ignore[attr-defined]
        seen.append((self.trainer.global_step, self.schedule_step, samples, weights.clone()))

    monkeypatch.setattr(TrainingModule, "_update", watched)
    monkeypatch.setattr(training_module.Precision, "needs_scaling", property(lambda self: True))
    cfg = config(tmp_path, "model.native_amp_init_scale=1024", "model.hysteresis=1")
    train(cfg)

    assert [step for step, _, _, _ in seen] == list(range(1, 9))
    assert [schedule for _, schedule, _, _ in seen] == [1, 2, 2, 2, 3, 4, 5, 6]
    consumed = [samples for _, _, samples, _ in seen]
    assert all(later > earlier for earlier, later in pairwise(consumed))
    weights = [vector for _, _, _, vector in seen]
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert moved == [True, False, False, True, True, True, True]
    assert all(torch.isfinite(vector).all() for vector in weights)

    rates, scales = logged(tmp_path, "lr"), logged(tmp_path, "loss_scale")
    warmup = [4e-5 + (4e-4 - 4e-5) * s / 2000 for s in (0, 1, 2, 2, 2, 3, 4, 5)]
    assert list(rates.values()) == pytest.approx(warmup, rel=1e-6)
    assert list(scales.values()) == [1024, 1024, 512, 256, 256, 256, 256, 256]


def test_the_loss_scale_does_not_change_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 a power of two changes no mantissa: losses and norms are bitwise equal to those of an unscaled run."""
    train(config(tmp_path / "plain"))
    monkeypatch.setattr(training_module.Precision, "needs_scaling", property(lambda self: True))
    train(config(tmp_path / "scaled", "model.native_amp_init_scale=65536"))
    for key in ("reduced_train_loss", "grad_norm", "lr"):
        assert logged(tmp_path / "scaled", key) == logged(tmp_path / "plain", key)
