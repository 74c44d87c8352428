# SPDX-License-Identifier: Apache-2.0
"""Compiled layers: one graph per kind of layer for training and one for evaluation, with the results of eager layers.

Attention and precision are those of GPUs; the kernels of attention are opaque to the compiler. No code is generated.
"""

import logging
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import TokenizedBatch
from bionemo.models.language_model import LanguageModel
from bionemo.training.compilation import compile_layers, shared_graphs
from tests.support.gpu_kernels import gpu_attention
from tests.support.models import batch_of, build_model, random_tokens
from tests.support.runs import MODELS

KINDS = dict.fromkeys(MODELS, 1) | dict.fromkeys(("prott5nv", "megamolbart"), 2)  # of layers
CASES = [
    ("esm2nv", 0.1, "eager"),  # does not trace the backward pass, which takes most of the time
    *(
        pytest.param(name, dropout, "aot_eager", marks=pytest.mark.slow)
        for name in MODELS
        for dropout in (0.0, 0.1)
    ),
]  # fmt: skip


@pytest.fixture
def backend(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Compile modules with this backend; graph breaks are errors."""
    import torch._dynamo

    caplog.set_level(logging.WARNING, "torch.__trace")  # thousands of lines

    original = nn.Module.compile

    def compile_module(module: nn.Module, **options: bool) -> None:
        original(module, backend=request.param, fullgraph=True, **options)

    def forget() -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    forget()
    with patch.object(nn.Module, "compile", compile_module):
        yield request.param
    forget()


def other_batch(model: LanguageModel) -> PackedBatch:
    """Return a batch with fewer sequences and tokens than `batch_of`."""
    inputs = random_tokens(model, (8, 40, 3), rows=1, seed=5)
    source = random_tokens(model, (50, 9, 31), rows=2, seed=6) if hasattr(model, "encode") else None
    return TokenizedBatch(inputs, np.arange(51), np.full(51, 7), source=source).unpack()


def losses_and_gradients(model: LanguageModel) -> list[Tensor]:
    """Return losses and gradients of two training steps, and the losses of two evaluations."""
    results = []
    for batch in batch_of(model, 3), other_batch(model):
        for training in True, False:
            model.train(training).zero_grad()
            with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
                loss, _ = model.compute_loss(batch)
            if training:
                loss.backward()
            results += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return results


@pytest.mark.parametrize(("name", "dropout", "backend"), CASES, indirect=["backend"])
@pytest.mark.usefixtures("backend")
def test_layers_share_graphs_and_agree_with_eager_layers(name: str, dropout: float) -> None:
    overrides = f"model.hidden_dropout={dropout}", f"model.attention_dropout={dropout}", "model.compile=True"
    model = build_model(name, *overrides)
    with gpu_attention() as eager_calls:
        expected = losses_and_gradients(model)
    with gpu_attention() as calls, shared_graphs():
        compile_layers(model)
        found = losses_and_gradients(model)
    assert calls == eager_calls
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2 * KINDS[name]
    tolerance = 4e-2 if name == "esmc" else 2e-2  # of bf16; its norms of queries and keys have larger errors
    for result, reference in zip(found, expected, strict=True):
        assert (result - reference).norm() <= tolerance * reference.norm().clamp_min(1e-3)
