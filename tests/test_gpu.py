# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU: agreement with the CPU, planned memory, resumed runs, fp16 and exhausted memory.

`pytest -m needs_gpu tests/test_gpu.py` runs them on a GPU; with BIONEMO_TEST_DEVICE=cpu they run on the CPU. NeMo and
RDKit are not needed. scripts/benchmark/gpu.py reads the recorded properties.
"""
# ruff: noqa: E402

import ctypes
import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest


def find_device() -> str:
    """Return the device of these tests, "" without a GPU; without NVIDIA's driver, torch is not imported."""
    if chosen := os.environ.get("BIONEMO_TEST_DEVICE"):
        return chosen
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    from torch import cuda

    return "cuda" if cuda.is_available() else ""


DEVICE = find_device()
if not DEVICE:
    pytest.skip("needs a CUDA device", allow_module_level=True)

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bionemo.common.errors import RankError
from bionemo.common.gpus import DEVICES
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import OptimConfig, RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.data_module import SequenceData
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.megatron import groups, vocabulary
from bionemo.megatron.precision import Precision
from bionemo.megatron.sharding import materialize, parameter_shards
from bionemo.megatron.train_step import ParallelModel
from bionemo.models.language_model import LanguageModel, load_model_class
from bionemo.planning.layouts import Layout
from bionemo.planning.lengths import Tokens
from bionemo.planning.measure import measure_step
from bionemo.planning.report import make_step
from bionemo.tokenizers import load_tokenizer
from bionemo.training.compilation import compile_layers, shared_graphs
from bionemo.training.micro_batches import fit_micro_batches
from bionemo.training.optimizers import build_optimizer
from tests.conftest import ROOT

Record = Callable[[str, object], None]

pytestmark = pytest.mark.needs_gpu
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="measures the memory of a GPU")
TARGET = torch.device(DEVICE)


class Family(NamedTuple):
    """Example of a model family, and the size of heads in these tests."""

    directory: str
    config: str
    head_size: int
    overrides: tuple[str, ...] = ("model.data.dataset_path=none",)
    package: str = "torch"  # which it needs


FAMILIES = {
    "esm2nv": Family("protein/esm2nv", "pretrain_esm2_8M", 16),
    "esm1nv": Family("protein/esm1nv", "pretrain_small", 64),
    "esm1b": Family("protein/esm1b", "pretrain_esm1b_small", 32),
    "prott5nv": Family("protein/prott5nv", "pretrain_small", 64),
    "megamolbart": Family("molecule/megamolbart", "pretrain_xsmall_span_aug", 32),
    "gpt3": Family("gpt3", "pretrain_gpt3_126m", 128, ("data@model.data=mock_text",), "tokenizers"),
}
SMALL = ("model.num_layers=3", "model.hidden_size=128", "model.seq_length=256")
# tokens of the sequences of two micro-batches: of the encoder or of the only stack, and of a decoder
LENGTHS = ((10, 256, 33, 157, 2, 41), (200, 64, 91))
DECODER_LENGTHS = ((7, 40, 1, 128, 13, 5), (65, 128, 30))
MODES = ("eager", "compiled")


def configure(name: str, *overrides: str, dropout: float | None = None) -> RunConfig:
    family = FAMILIES[name]
    pytest.importorskip(family.package)
    dropouts = [] if dropout is None else [f"model.{part}_dropout={dropout}" for part in ("hidden", "attention")]
    directory = ROOT / "examples" / family.directory / "conf"
    return load(family.config, [*family.overrides, *dropouts, *overrides], directory)


def small(name: str, dropout: float) -> RunConfig:
    return configure(name, *SMALL, f"model.num_attention_heads={128 // FAMILIES[name].head_size}", dropout=dropout)


def build(cfg: RunConfig, device: torch.device) -> LanguageModel:
    """Return an initialized model, built as in a run."""
    model_class = load_model_class(cfg.model._target_)
    with torch.device("meta"):
        model = model_class(cfg.model, load_tokenizer(model_class.tokenizer, cfg.model.tokenizer))
    materialize(model, device)
    model.initialize_weights(cfg.model.seed)
    return model.train()


@torch.no_grad()
def perturb(model: LanguageModel) -> LanguageModel:
    """Change all parameters, so that biases and norms have an effect."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device), alpha=0.1)
    return model


def random_tokens(model: LanguageModel, lengths: tuple[int, ...], padding: int, seed: int) -> TokenSequences:
    """Return random tokens, every seventh of them masked if the vocabulary has a mask."""
    random = np.random.default_rng(seed)
    ids = random.integers(5, 25, sum(lengths) + padding)
    if (mask_id := getattr(model.vocabulary, "mask_id", None)) is not None:
        ids[::7] = mask_id
    keys = random.integers(0, 2**63, len(lengths)).astype(np.uint64)
    return TokenSequences(ids, np.array(lengths), model.config.seq_length, keys)


def micro_batches_of(model: LanguageModel) -> list[PackedBatch]:
    """Return two micro-batches with different numbers of tokens; a third of the tokens are target positions."""
    pair, batches = hasattr(model, "encode"), []
    for number, lengths in enumerate(LENGTHS):
        inputs = random_tokens(model, DECODER_LENGTHS[number] if pair else lengths, 77 - 30 * number, number)
        source = random_tokens(model, lengths, 55, 10 + number) if pair else None
        targets = np.arange(0, int(inputs.lengths.sum()), 3)
        answers = np.random.default_rng(20 + number).integers(5, 25, len(targets))
        batches.append(TokenizedBatch(inputs, targets, answers, source=source).unpack())
    return batches


class Gradients(NamedTuple):
    """Result of a step."""

    loss: float  # sum over the target tokens
    norm: float  # of the mean gradient
    gradients: dict[str, Tensor]  # sum over the target tokens, by parameter, on the CPU


@cache
def gradients_on_cpu(name: str, dropout: float) -> Gradients:
    """Compute a step in fp32 on the CPU, without gradient buffers of Megatron."""
    model, loss, count = perturb(build(small(name, dropout), torch.device("cpu"))), 0.0, 0
    for batch in micro_batches_of(model):
        total, targets = model.compute_loss(batch)
        total.backward()
        loss, count = loss + total.item(), count + int(targets)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = sum(float(each.double().square().sum()) for each in gradients.values()) ** 0.5 / count
    return Gradients(loss, norm, gradients)


def compare(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the relative difference of all gradients together, and the largest one of loss, norm and parameters."""
    assert found.gradients.keys() == expected.gradients.keys()
    errors = {name: float((found.gradients[name] - each).norm()) for name, each in expected.gradients.items()}
    norms = {name: float(each.norm()) for name, each in expected.gradients.items()}
    largest = [errors[name] / norms[name] for name in norms]
    largest += [abs(x / y - 1) for x, y in zip(found[:2], expected[:2], strict=True)]
    assert all(map(math.isfinite, largest))
    return math.hypot(*errors.values()) / math.hypot(*norms.values()), max(largest)


@contextmanager
def process_groups() -> Iterator[None]:
    """Create the process groups of a run with one process; a plan must be made before."""
    dist.init_process_group("nccl" if TARGET.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups.initialize(1, 1)
        yield
    finally:
        groups.destroy()
        dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Create the process groups of a run with one process."""
    with process_groups():
        yield


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Multiply fp32 matrices in fp32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


@contextmanager
def compilation() -> Iterator[None]:
    """Compile layers, as in a run, and check that some were; forget them at the end: their number is limited."""
    import torch._dynamo  # imports the compiler, which takes seconds
    from torch._dynamo.utils import counters

    counters.clear()
    try:
        with shared_graphs():
            yield
        assert counters["stats"]["unique_graphs"] > 0  # layers that cannot be compiled are interpreted
    finally:
        torch._dynamo.reset()


def parallelize(model: LanguageModel, precision: str) -> ParallelModel:
    return ParallelModel(model, partial(Precision(precision).autocast, TARGET))


def gradients_on_device(name: str, dropout: float, precision: str, mode: str) -> Gradients:
    """Compute a step on the device, as a run does."""
    cfg = small(name, dropout)
    cfg.model.compile = mode == "compiled"
    model = perturb(build(cfg, TARGET))
    batches = [batch.to(TARGET) for batch in micro_batches_of(model)]
    if mode == "compiled":
        compile_layers(model)
    parallel = parallelize(model, precision)
    with compilation() if mode == "compiled" else nullcontext():
        loss, _ = parallel.forward_backward(batches)
    gradients = {each.shard.name: each.gradient.cpu() for each in parallel.optimizer_shards}
    return Gradients(float(loss), float(parallel.gradient_norm()), gradients)


def cases(*kinds: tuple[str, float]) -> Any:
    """Parametrize a test with mode and dropout, for each family."""
    given = [(name, mode, dropout) for name in FAMILIES for mode, dropout in kinds]
    ids = [f"{name}-{mode}-{'dropout' if dropout else 'plain'}" for name, mode, dropout in given]
    return pytest.mark.parametrize(("name", "mode", "dropout"), given, ids=ids)


@pytest.mark.usefixtures("one_rank")
@cases(("eager", 0.0), ("eager", 0.1), ("compiled", 0.1))
def test_fp32_gradients(name: str, mode: str, dropout: float, record_property: Record) -> None:
    """They equal those of the CPU, also with dropout, whose masks are the same on all devices."""
    _, largest = compare(gradients_on_device(name, dropout, "32", mode), gradients_on_cpu(name, dropout))
    record_property("difference", largest)
    assert largest <= 1e-4


@pytest.mark.usefixtures("one_rank")
@cases(("eager", 0.0), ("eager", 0.1), ("compiled", 0.0), ("compiled", 0.1))
def test_bf16_gradients(name: str, mode: str, dropout: float, record_property: Record) -> None:
    whole, largest = compare(gradients_on_device(name, dropout, "bf16-mixed", mode), gradients_on_cpu(name, dropout))
    record_property("difference", largest)
    assert whole <= 2e-2
    assert largest <= 5e-2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["esm2nv"])
def test_bf16_gradients_of_a_loss_in_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    cfg = small(name, 0.0)
    model = perturb(build(cfg, TARGET))
    batch = micro_batches_of(model)[0].to(TARGET)
    found = []
    for chunk in (vocabulary.CHUNK, 50 * model.padded_vocab_size):
        monkeypatch.setattr(vocabulary, "CHUNK", chunk)
        with Precision("bf16-mixed").autocast(TARGET):
            loss, _ = model.compute_loss(batch)
        gradients = torch.autograd.grad(loss, list(model.lm_head.parameters()))
        found.append(torch.cat([loss.detach().reshape(1), *(each.flatten() for each in gradients)]))
    difference = float((found[1] - found[0]).norm() / found[0].norm())
    record_property("difference", difference)
    assert difference <= 2e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_weights(name: str) -> None:
    cfg = small(name, 0.1)
    found, expected = (parameter_shards(build(cfg, device)) for device in (TARGET, torch.device("cpu")))
    for (ours, shard), (theirs, other) in zip(found.items(), expected.items(), strict=True):
        assert shard == other
        assert ours.device.type == TARGET.type
        assert torch.equal(ours.cpu(), theirs), shard.name


def adamw(model: LanguageModel, config: OptimConfig) -> torch.optim.Optimizer:
    """Return torch's optimizer with weight decay for matrices only."""
    parameters = list(model.parameters())
    matrices, vectors = ([each for each in parameters if (each.ndim > 1) is matrix] for matrix in (True, False))
    split = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(split, lr=1e-3, betas=(config.betas[0], config.betas[1]), eps=config.eps)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_updates(name: str, record_property: Record) -> None:
    """They equal those of a loop on the CPU with torch's optimizer and clipping."""
    cfg = small(name, 0.1)
    cfg.model.optim.lr, cfg.model.optim.weight_decay = 1e-3, 5.0  # so large that the losses show it
    model = build(cfg, torch.device("cpu"))
    optimizer, expected = adamw(model, cfg.model.optim), []
    for _ in range(5):
        totals = [torch.stack(model.compute_loss(batch)) for batch in micro_batches_of(model)]
        loss = torch.stack(totals).sum(0)[0] / sum(int(total[1]) for total in totals)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        optimizer.step()

    model = build(cfg, TARGET)
    parallel, found = parallelize(model, "32"), []
    ours: Any = build_optimizer(cfg.model.optim, parallel.optimizer_shards, model.learning_rate_factor)
    for _ in range(5):
        total, count = parallel.forward_backward([batch.to(TARGET) for batch in micro_batches_of(model)])
        found.append(float(total / count))
        ours.grad_scale = parallel.gradient_scale(parallel.gradient_norm(), 4.0)
        ours.step()
        parallel.finish_update()
    largest = max(abs(x / y - 1) for x, y in zip(found, expected, strict=True))
    record_property("difference", largest)
    assert expected[-1] < 0.98 * expected[0]
    assert largest <= 1e-4


def planned_batch(sides: list[Tokens], rows: int) -> PackedBatch:
    """Return a micro-batch with as many tokens, sequences and target positions as a plan assumes."""
    number, packed = round(rows * sides[0].row * sides[0].filled / sides[0].mean), []
    for side in sides:
        total = side.count(rows)
        lengths = np.full(number, int(total * side.filled) // number)
        keys = np.arange(number).astype(np.uint64)
        packed.append(TokenSequences(np.full(total, 5), lengths, side.max_length, keys))
    targets = np.arange(int(packed[-1].lengths.sum() * sides[-1].target_fraction))
    source = packed[0] if len(sides) == 2 else None
    return TokenizedBatch(packed[-1], targets, np.full(len(targets), 5), source=source).unpack()


def peak_of_second_update(cfg: RunConfig, batch: PackedBatch, precision: str) -> int:
    """Return the bytes that the model, its optimizer and an update need at most."""
    matrix = torch.ones(512, 512, device=TARGET, requires_grad=True)
    with Precision(precision).autocast(TARGET):  # cuBLAS keeps a workspace for each thread
        (matrix @ matrix).sum().backward()
    del matrix
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = build(cfg, TARGET)
    if cfg.model.compile is True:
        compile_layers(model)
    parallel = parallelize(model, precision)
    optimizer: Any = build_optimizer(cfg.model.optim, parallel.optimizer_shards, model.learning_rate_factor)
    with compilation() if cfg.model.compile is True else nullcontext():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            parallel.forward_backward([batch])
            optimizer.grad_scale = parallel.gradient_scale(parallel.gradient_norm(), 1.0)
            optimizer.step()
            parallel.finish_update()
    return torch.cuda.max_memory_allocated() - before


@ON_GPU
@pytest.mark.parametrize(
    ("name", "mode", "precision"),
    [*((name, "eager", "bf16-mixed") for name in FAMILIES), ("esm2nv", "eager", "32"), ("gpt3", "eager", "32"),
     ("esm2nv", "compiled", "bf16-mixed"), ("prott5nv", "compiled", "bf16-mixed")],
)  # fmt: skip
def test_memory(name: str, mode: str, precision: str, record_property: Record) -> None:
    """An update needs as much memory as planned; with compiled layers, which a plan does not include, also less."""
    large = ("model.num_layers=6", "model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=512")
    cfg = configure(name, *large)
    cfg.model.compile = mode == "compiled"
    step = make_step(cfg, precision, DEVICES["h200"])
    rows = round((4096 if name == "gpt3" else 16384) / step.tokens[0].row)  # logits of 50,257 tokens are large
    costs = measure_step(step, Layout(1, 1, 1, 1, MicroBatches(rows, 1)), 0)
    planned = 16 * costs.parameters + costs.peak
    batch = planned_batch(list(step.tokens), rows).to(TARGET)
    with process_groups():
        measured = peak_of_second_update(cfg, batch, precision)
    record_property("measured", measured)
    record_property("planned", planned)
    assert (0.8 if mode == "eager" else 0.4) <= measured / planned <= 1.1


def mock_data(cfg: RunConfig, rows: int) -> SequenceData:
    """Return data whose step is one micro-batch."""
    kind = load_model_class(cfg.model._target_)
    vocabulary = load_tokenizer(kind.tokenizer, cfg.model.tokenizer)
    return SequenceData(cfg.model, cfg.trainer, vocabulary, kind.dataset, MicroBatches(rows, 1))


@pytest.fixture
def limited_memory() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the memory of this process to a number of bytes."""
    total = torch.cuda.get_device_properties(TARGET).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


@ON_GPU
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["esm2nv"])
def test_exhausted_memory(name: str, limited_memory: Callable[[int], None]) -> None:
    """Micro-batches become smaller until they fit; the limit lies between the memory for 16 and for 32 rows."""
    lengths = ("data@model.data=mock", "model.data.mock.min_length=200", "model.data.mock.max_length=1000")
    cfg = configure(name, *lengths, "model.data.dataset_path=null")
    parallel, data = parallelize(build(cfg, TARGET), "bf16-mixed"), mock_data(cfg, 64)
    whole, half = data.micro_batches, data.micro_batches.limit(16)
    data.micro_batches = half
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    assert fit_micro_batches(parallel, data, TARGET) == half
    needed = torch.cuda.max_memory_reserved() - before
    limited_memory(before + round(1.4 * needed))

    data.micro_batches = whole
    assert fit_micro_batches(parallel, data, TARGET) == half
    step = next(iter(data.training_steps(half)))
    loss, count = parallel.forward_backward([batch.to(TARGET) for batch in step.micro_batches])
    assert len(step.micro_batches) == 4
    assert math.isfinite(float(loss / count))

    limited_memory(before + needed // 64)
    torch.cuda.empty_cache()
    with pytest.raises(RankError, match="not enough memory for a micro-batch of one row"):
        fit_micro_batches(parallel, data, TARGET)


class Recorder(pl.Callback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: object) -> None:
        self.losses.append(pl_module.loss_and_norm()[0])


@pytest.mark.parametrize("name", ["esm2nv"])
def test_fp16_training(name: str) -> None:
    """The gradients of the first steps overflow, until the loss scale is low enough."""
    pytest.importorskip("safetensors")  # for checkpoints, of which this run writes none
    from bionemo.training.build_trainer import build_trainer
    from bionemo.training.module import TrainingModule

    cfg = configure(
        name, "data@model.data=mock", "model.data.dataset_path=null", "model.data.num_workers=0",
        "model.num_layers=2", "model.hidden_size=32", "model.seq_length=64", "model.num_attention_heads=2",
        "model.native_amp_init_scale=65536", "model.compile=False", "model.optim.lr=5e-3",
        "model.optim.sched.warmup_steps=0", f"trainer.accelerator={'cpu' if DEVICE == 'cpu' else 'gpu'}",
        "trainer.max_steps=30", "trainer.limit_val_batches=0", "exp_manager.create_checkpoint_callback=False",
        dropout=0.1,
    )  # fmt: skip
    recorder, data = Recorder(), mock_data(cfg, 8)
    build_model = partial(load_model_class(cfg.model._target_), cfg.model, data.vocabulary)
    module = TrainingModule(build_model, cfg.model, cfg.trainer, Precision("16-mixed"))
    build_trainer(cfg, [recorder]).fit(module, data)
    assert len(recorder.losses) == 30
    assert all(map(math.isfinite, recorder.losses))
    assert sum(recorder.losses[-5:]) < 0.95 * sum(recorder.losses[:5])
    assert 10 < module.schedule_step < 30  # updates that were not skipped
    assert module.scaler.scale < 65536


@pytest.mark.parametrize("name", ["esm2nv", "gpt3"])
def test_resumed_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trainer.deterministic=True it equals an uninterrupted one bitwise, also compiled and with dropout."""
    pytest.importorskip("nemo")
    pytest.importorskip(FAMILIES[name].package)
    from tests.support.runs import config, fingerprint, logged, train

    for variable in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):  # the run sets them
        monkeypatch.delenv(variable, raising=False)
    overrides = (
        "++trainer.deterministic=True", f"trainer.accelerator={'cpu' if DEVICE == 'cpu' else 'gpu'}",
        "trainer.precision=auto", "model.micro_batch_size=auto", "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1", "exp_manager.checkpoint_callback_params.every_n_train_steps=3",
    )  # fmt: skip
    train(config(tmp_path / "whole", *overrides, model=name))
    train(config(tmp_path / "parts", *overrides, model=name), stop_before_step=6)
    train(config(tmp_path / "parts", *overrides, model=name))
    losses = logged(tmp_path / "whole", "reduced_train_loss")
    assert len(losses) == 8
    assert logged(tmp_path / "parts", "reduced_train_loss") == losses
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
