# SPDX-License-Identifier: Apache-2.0
"""Optional back ends of GPUs: when they are used, and why not; a GPU and packages are simulated on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry

from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.megatron import attention
from bionemo.megatron.attention import PackedSequences, attend_per_sequence
from bionemo.megatron.precision import Precision
from bionemo.megatron.vocabulary import language_model_loss
from bionemo.training import backends
from bionemo.training.backends import activate_flash_attention, convert_linear_layers, float8_problem, select_backends
from tests.conftest import EXAMPLES
from tests.support.models import batch_of, build_model

CPU, BF16 = torch.device("cpu"), Precision("bf16-mixed")
FLASH4, CUDNN = "flash_attn.cute.interface", "cudnn.torch"
Error = Callable[[Tensor, bool], Tensor]  # changes the output, given whether attention is causal


@cache
def _loaded() -> RunConfig:
    return load("pretrain_esm2_8M", ["model.data.dataset_path=none"], EXAMPLES / "esm2nv" / "conf")


def configured(**changes: Any) -> RunConfig:
    cfg = deepcopy(_loaded())
    for key, value in changes.items():
        setattr(cfg.model, key, value)
    return cfg


def scaled_gradient(output: Tensor, factor: float) -> Tensor:
    return output + (factor - 1) * (output - output.detach())


class Packages:
    """Packages that register their kernels in torch's registry when they are imported.

    Attributes:
        names: name of the implementation in the registry, of each package that is installed.
        errors: errors of the results of an implementation; without one, they are those of FlashAttention 2.
        calls: data types of the queries.
    """

    def __init__(self) -> None:
        self.names, self.errors, self.calls = {FLASH4: "FA4", CUDNN: "CUDNN"}, dict[str, Error](), set[torch.dtype]()

    def import_module(self, module: str) -> None:
        if module not in self.names:
            raise ModuleNotFoundError(f"No module named {module!r}\nSee the manual.")
        name = self.names[module]
        registry.register_flash_attention_impl(name, register_fn=partial(_Handle, name))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float, *, causal: bool
    ) -> Tensor:
        self.calls.add(q.dtype)
        keys = sequences.context or sequences
        out = attend_per_sequence(q, k, v, sequences.lengths, scale, None, keys.lengths, causal)
        for name in _Handle.active:
            out = self.errors.get(name, lambda same, _: same)(out, causal)
        return out


class _Handle:
    """Kernels that are in use until they are removed."""

    active: list[str] = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name
        self.active.append(name)

    def remove(self) -> None:
        self.active.remove(self.name)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    from torch.nn.attention import _registry

    simulated = Packages()
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    monkeypatch.setattr(_Handle, "active", [])
    monkeypatch.setattr(backends, "import_module", simulated.import_module)
    monkeypatch.setattr(backends, "attend_on_gpu", simulated.attend)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    yield simulated
    registry.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize(("option", "name"), [("flash4", "FA4"), ("cudnn", "CUDNN")])
def test_implementation_with_equal_results(
    packages: Packages, caplog: pytest.LogCaptureFixture, option: str, name: str
) -> None:
    packages.errors[name] = lambda out, _: 1.005 * out  # rounding in 16 bits
    assert activate_flash_attention(option, 64, BF16, CPU) is None
    assert registry.current_flash_attention_impl() == name
    assert _Handle.active == [name]
    assert activate_flash_attention("flash2", 64, BF16, CPU) is None  # the next run of a sweep
    assert registry.current_flash_attention_impl() is None
    assert _Handle.active == []
    assert activate_flash_attention("flash2", 64, BF16, CPU) is None
    assert not caplog.records  # torch warns if there is nothing to restore


@pytest.mark.parametrize(
    "error",
    [
        lambda out, causal: 1.05 * out if causal else out,
        lambda out, causal: out if causal else 1.05 * out,
        lambda out, causal: scaled_gradient(out, 1.05) if causal else out,
        lambda out, causal: out * float("nan"),
    ],
    ids=["causal", "cross", "gradients", "nan"],
)
def test_implementation_with_other_results(packages: Packages, error: Error) -> None:
    packages.errors["FA4"] = error
    assert activate_flash_attention("flash4", 64, BF16, CPU) == "its results differ from those of FlashAttention 2"
    assert registry.current_flash_attention_impl() is None
    assert _Handle.active == []


def test_implementation_that_ignores_the_mask(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any, causal: bool) -> Tensor:
        return packages.attend(*arguments, causal=causal and not _Handle.active)

    monkeypatch.setattr(backends, "attend_on_gpu", attend)
    assert activate_flash_attention("flash4", 64, BF16, CPU) == "its results differ from those of FlashAttention 2"


def test_implementation_that_fails(packages: Packages) -> None:
    def fail(out: Tensor, _: bool) -> Tensor:
        raise RuntimeError("no kernel image\nfor this GPU")

    packages.errors["CUDNN"] = fail
    assert activate_flash_attention("cudnn", 64, BF16, CPU) == (
        "nvidia-cudnn-frontend fails with RuntimeError: no kernel image"
    )
    assert registry.current_flash_attention_impl() is None


def test_package_without_the_implementation(packages: Packages) -> None:
    packages.names[CUDNN] = "NAME OF ANOTHER VERSION"
    problem = activate_flash_attention("cudnn", 64, BF16, CPU)
    assert problem is not None
    assert problem.startswith("nvidia-cudnn-frontend fails with ValueError: Unknown flash attention impl 'CUDNN'")


def test_data_type_of_the_run(packages: Packages) -> None:
    assert activate_flash_attention("flash4", 64, BF16, CPU) is None
    assert packages.calls == {torch.bfloat16}
    packages.calls.clear()
    assert activate_flash_attention("flash4", 64, Precision("16-mixed"), CPU) is None
    assert packages.calls == {torch.float16}


@pytest.mark.usefixtures("packages")
def test_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert activate_flash_attention("flash4", 64, BF16, CPU) == "it needs torch 2.13, not 2.12.1+cu130"
    assert activate_flash_attention("flash2", 64, BF16, CPU) is None


@pytest.fixture
def gpu(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """Simulate a GPU of compute capability 9.0 with Triton, whose samples are computed on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(attention, "find_spec", lambda _: True)
    sample = backends._sample_results
    monkeypatch.setattr(backends, "_sample_results", lambda size, precision, _: sample(size, precision, CPU))
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield packages
    torch.use_deterministic_algorithms(deterministic)


EXCLUDED = "attention dropout, determinism, precision, head size or the GPU excludes FlashAttention"
MISSING = f"flash-attn-4 is not installed or cannot be imported (No module named '{FLASH4}')"


@pytest.mark.parametrize(
    ("changes", "precision", "deterministic", "used", "problem"),
    [
        ({}, "bf16-mixed", False, "flash2", None),
        ({"gpu_attention": "flash4"}, "bf16-mixed", False, "flash4", None),
        ({"gpu_attention": "cudnn"}, "16-mixed", False, "cudnn", None),
        ({"attention_dropout": 0.1}, "bf16-mixed", False, "triton", None),
        ({"gpu_attention": "flash4", "attention_dropout": 0.1}, "bf16-mixed", False, "triton", EXCLUDED),
        ({"gpu_attention": "flash4"}, "32", False, "triton", EXCLUDED),
        ({"gpu_attention": "flash4"}, "bf16-mixed", True, "triton", EXCLUDED),
        ({"gpu_attention": "cudnn", "kv_channels": 20}, "bf16-mixed", False, "triton", EXCLUDED),
        ({"gpu_attention": "cudnn", "kv_channels": 264}, "bf16-mixed", False, "sequences", EXCLUDED),
    ],
)
def test_attention_of_a_run(
    gpu: Packages, changes: dict[str, Any], precision: str, deterministic: bool, used: str, problem: str | None
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    cfg = configured(**changes)
    found = select_backends(cfg, Precision(precision), torch.device("cuda"))
    notes = (f"model.gpu_attention={cfg.model.gpu_attention} is not used: {problem}",) if problem else ()
    assert found == (used, False, notes)
    assert _Handle.active == {"flash4": ["FA4"], "cudnn": ["CUDNN"]}.get(used, [])


def test_packages_that_are_not_installed(gpu: Packages) -> None:
    gpu.names.clear()
    cfg = configured(gpu_attention="flash4")
    found = select_backends(cfg, BF16, torch.device("cuda"))
    assert found == ("flash2", False, (f"model.gpu_attention=flash4 is not used: {MISSING}",))


@pytest.mark.usefixtures("gpu")
def test_next_run_with_dropout() -> None:
    """A run that FlashAttention cannot compute removes the implementation of the run before."""
    cuda = torch.device("cuda")
    assert select_backends(configured(gpu_attention="flash4"), BF16, cuda).attention == "flash4"
    assert select_backends(configured(attention_dropout=0.1), BF16, cuda).attention == "triton"
    assert _Handle.active == []


def test_cpu() -> None:
    assert select_backends(configured(gpu_attention="flash4"), BF16, CPU) == (None, False, ())
    note = "model.float8=True is not used: it needs a GPU"
    assert select_backends(configured(float8=True), BF16, CPU) == (None, False, (note,))


OLD, PARALLEL = "Some GPU is older than compute capability 8.9", "it does not support tensor parallelism"


@pytest.mark.parametrize(
    ("capability", "precision", "tensor", "problem"),
    [
        ((8, 6), "bf16-mixed", 1, OLD),
        ((9, 0), "16-mixed", 1, "it needs trainer.precision=bf16-mixed, not 16-mixed"),
        ((9, 0), "32", 1, "it needs trainer.precision=bf16-mixed, not 32"),
        ((9, 0), "bf16-mixed", 2, PARALLEL),
        ((8, 9), "bf16-mixed", 1, None),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_conditions_of_float8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, tensor: int, problem: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(backends, "import_module", ModuleType)
    cfg = configured(float8=True, tensor_model_parallel_size=tensor)
    found = select_backends(cfg, Precision(precision), torch.device("cuda"))
    assert found.float8 is (problem is None)
    assert found.notes == ((f"model.float8=True is not used: {problem}",) if problem else ())


@pytest.mark.parametrize("error", [ModuleNotFoundError, AttributeError])
@pytest.mark.usefixtures("gpu")
def test_float8_without_torchao(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def import_module(name: str) -> None:
        raise error(f"no {name}\nmore")

    monkeypatch.setattr(backends, "import_module", import_module)
    problem = "torchao is not installed or cannot be imported (no torchao.float8)"
    assert float8_problem(configured().model, BF16, gpu=True) == problem


def test_float8_losses() -> None:
    """They differ from those of bf16 by rounding; the products are emulated on a CPU."""
    pytest.importorskip("torchao")
    losses: dict[bool, list[float]] = {}
    names = []
    for float8 in (False, True):
        model = build_model("esm2nv", "model.ffn_hidden_size=200").train()  # 200 is not a multiple of 16
        if float8:
            convert_linear_layers(model)
        batch, optimizer = batch_of(model, rows=3), torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[float8] = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss, count = language_model_loss(model(batch), batch)
            losses[float8].append(float(loss.detach() / count))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        names.append([name for name, _ in model.named_parameters()])
        layer = model.blocks()[0].layers[0]
        converted = [
            type(module).__name__ == "Float8Linear" for module in layer.modules() if hasattr(module, "weight")
        ]
        assert sum(converted) == 2 * float8  # of four linear layers
    assert names[0] == names[1]
    assert losses[False][-1] < 0.9 * losses[False][0]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True] != losses[False]


def test_float8_leaves_layers_with_adapters() -> None:
    pytest.importorskip("torchao")
    model = build_model("esm2nv")
    adapted = model.blocks()[0].layers[0].mlp.linear_fc1
    adapted.add_module("adapter", torch.nn.Linear(64, 4))
    convert_linear_layers(model)
    assert model.blocks()[0].layers[0].mlp.linear_fc1 is adapted
    assert model.blocks()[0].layers[1].mlp.linear_fc1 is not adapted
    assert type(model.blocks()[0].layers[1].mlp.linear_fc1) is not type(adapted)
