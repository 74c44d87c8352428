# SPDX-License-Identifier: Apache-2.0
"""Muon against torch.optim.Muon and the singular value decomposition; runs with it resume bitwise."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bionemo.common.errors import UserError
from bionemo.config.schema import OptimConfig, SchedConfig
from bionemo.megatron.sharding import ParameterShard
from bionemo.megatron.train_step import OptimizerShard
from bionemo.training.muon import Muon, orthogonalize
from bionemo.training.optimizers import build_optimizer
from tests.support.runs import config, fingerprint, logged, train

EVERY_3 = "exp_manager.checkpoint_callback_params.every_n_train_steps=3"
MUON = "model.optim.name=muon"


@pytest.mark.parametrize("shape", [(16, 16), (3, 8, 24), (2, 24, 8)])
def test_orthogonalized_matrices_have_the_singular_vectors_of_the_matrix(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    values = torch.linspace(1, 0.1, left.shape[-1], dtype=torch.float64)
    found = orthogonalize((left * values @ right * 7).float()).double()
    rotated = left.mT @ found @ right.mT  # diagonal if the singular vectors are the same
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    assert (rotated - torch.diag_embed(diagonal)).abs().max() < 1e-5
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    # The polynomial of Jordan's post, applied to each singular value.
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(diagonal, expected.expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_a_matrix_of_zeros_remains_zero() -> None:
    assert orthogonalize(torch.zeros(2, 4, 8)).count_nonzero() == 0


def test_updates_equal_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon computes in bf16 on every device: here it gets the same orthogonalization."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda gradient, *_: orthogonalize(gradient).clone()
    )
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((8, 4), (4, 8), (8, 4), (6,), (5, 3))]
    ours, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    matrices, others = [{"params": ours[:3], "weight_decay": 0.1}], [{"params": ours[3:], "weight_decay": 0.02}]
    optimizer = Muon(matrices, others, lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    references = [
        torch.optim.Muon(theirs[:3], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[3:], lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.02, fused=True),
    ]
    for step in range(4):
        for own, their in zip(ours, theirs, strict=True):
            gradient = torch.randn(own.shape, generator=generator)
            own.grad, their.grad = gradient * (step + 1), gradient.clone()
        optimizer.grad_scale = torch.tensor(step + 1.0)
        for each in (optimizer, *references):
            each.step()
    for own, their, before in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)
        assert (own - before).abs().max() > 1e-3


def test_steps_with_infinite_gradients_are_left_out() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    optimizer = Muon([{"params": parameters[:1]}], [{"params": parameters[1:]}], lr=0.1)
    for each in parameters:
        each.grad = torch.full_like(each, torch.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all((each == 1).all() for each in parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert all(each.isfinite().all() and (each != 1).all() for each in parameters)


def test_only_matrices_of_layers_have_muon() -> None:
    shapes = {
        "word_embeddings.weight": (8, 4), "encoder.layers.0.mlp.linear_fc1.weight": (16, 4),
        "encoder.layers.0.mlp.linear_fc1.bias": (16,), "lm_head.dense.weight": (4, 4),
    }  # fmt: skip
    shards = []
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.zeros(shape))
        shard = ParameterShard(name, shape, (0,) * len(shape), True)
        shards.append(OptimizerShard(parameter, torch.zeros(shape), parameter, shard, 0))
    schedule = SchedConfig(name="CosineAnnealing")
    optim = OptimConfig(name="muon", lr=0.1, weight_decay=0.5, betas=[0.9, 0.98], eps=1e-8, sched=schedule)
    groups = build_optimizer(optim, shards, lambda _: 1.0).param_groups
    found = {name for name, each in zip(shapes, shards, strict=True) if is_in(each.parameter, groups[0]["params"])}
    assert found == {"encoder.layers.0.mlp.linear_fc1.weight"}
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5, 0]


def is_in(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(tensor is each for each in tensors)


def test_a_resumed_run_is_bitwise_equal(tmp_path: Path) -> None:
    train(config(tmp_path / "whole", EVERY_3, MUON))
    cfg = config(tmp_path / "parts", EVERY_3, MUON)
    train(cfg, stop_before_step=4)
    train(cfg)
    losses = logged(tmp_path / "whole", "reduced_train_loss")
    assert len(losses) == 8
    assert logged(tmp_path / "parts", "reduced_train_loss") == losses
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [("fused_adam", "muon"), ("muon", "fused_adam")])
def test_a_run_does_not_change_to_or_from_muon(tmp_path: Path, before: str, after: str) -> None:
    train(config(tmp_path, EVERY_3, f"model.optim.name={before}"), stop_before_step=4)
    found = "muon" if before == "muon" else "another optimizer"
    with pytest.raises(
        UserError, match=f"has the state of {found}, but model.optim.name={after}: .*restore_from_path"
    ):
        train(config(tmp_path, EVERY_3, f"model.optim.name={after}"))


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"muon needs whole matrices, but model\.tensor_model_parallel_size=2"):
        config(tmp_path, MUON, "model.tensor_model_parallel_size=2", "trainer.devices=2")
