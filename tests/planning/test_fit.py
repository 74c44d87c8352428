# SPDX-License-Identifier: Apache-2.0
"""The micro-batch that the plan chooses for a GPU, and the error for a GPU that is too small."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from bionemo.common.errors import HostError
from bionemo.config.check import MicroBatches, check_config, divide_batch
from bionemo.config.schema import RunConfig
from bionemo.planning import fit
from bionemo.planning.devices import DEVICES, Device, current_device
from bionemo.planning.fit import fit_micro_batches
from bionemo.planning.layouts import read_layout
from bionemo.planning.measure import StepProfiler
from bionemo.planning.report import compare_layouts, evaluate_layout
from tests.planning.simulated_rank import config

A100 = DEVICES["a100-40"]
SMALL = replace(A100, memory=20 * 1024)
LAYERS, HIDDEN = 18, 2560  # half of ESM-2 3B
STATES = 16 * LAYERS * 12 * HIDDEN**2 / 2**30  # 21 GiB: 4 + 4 + 8 bytes for the 12 h^2 weights of each layer
LARGE: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": 4 * HIDDEN, "num_attention_heads": 40,
    "seq_length": 1024,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shared_profilers() -> Iterator[None]:
    """Share the profiles of the model, which take most of the time."""
    known: dict[object, StepProfiler] = {}
    make = fit.make_profiler

    def shared(cfg: RunConfig, precision: str, device: Device) -> StepProfiler:
        return known.setdefault((precision, device.bf16), make(cfg, precision, device))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "make_profiler", shared)
        yield


def sized(gib: float) -> Device:
    return replace(A100, memory=round(gib * 1024))


def fitted(cfg: RunConfig, device: Device) -> tuple[MicroBatches, MicroBatches]:
    """Return the micro-batches before and after `fit_micro_batches`."""
    gpus = read_layout(cfg).gpus
    before = divide_batch(cfg.model, cfg.trainer, gpus, on_gpu=True)
    return before, fit_micro_batches(cfg, before, "bf16-mixed", device)


def profiler_of(cfg: RunConfig, device: Device) -> StepProfiler:
    return fit.make_profiler(cfg, "bf16-mixed", device)


def fits(cfg: RunConfig, micro_batches: MicroBatches, device: Device) -> bool:
    layout = replace(read_layout(cfg), micro_batch_size=micro_batches.size, num_micro_batches=micro_batches.count)
    return evaluate_layout(profiler_of(cfg, device), layout, device).fits


def large(gpus: int = 1, **changes: Any) -> RunConfig:
    """Return the configuration of the large model, see `config`; `global_batch_size` is another change."""
    batch = changes.pop("global_batch_size", None)
    cfg = config("esm2nv", gpus, **LARGE, **changes)
    cfg.model.global_batch_size = batch
    return cfg


def automatic(rows: int = 12, **changes: Any) -> RunConfig:
    return large(micro_batch_size="auto", replica_batch_size=rows, **{"accumulate": None, **changes})


def error(cfg: RunConfig, device: Device) -> str:
    with pytest.raises(HostError) as caught:
        fitted(cfg, device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_automatic_size_is_the_largest_divisor_of_the_rows_that_fits() -> None:
    sizes = set()
    for rows in (12, 35, 64):
        cfg = automatic(rows)
        for gib in (29, 34, 42, 80):
            device = sized(gib)
            before, after = fitted(cfg, device)
            assert before == MicroBatches(rows, 1)
            assert after.size * after.count == rows
            divisors = [size for size in range(1, rows + 1) if rows % size == 0]
            assert after.size == max(size for size in divisors if fits(cfg, MicroBatches(size, rows // size), device))
            assert after.largest is not None
            assert fits(cfg, MicroBatches(after.largest, 1), device)
            assert not fits(cfg, MicroBatches(after.largest + 1, 1), device)
            sizes.add((rows, after.size))
    assert len(sizes) > 6  # the device matters


def test_a_larger_device_never_has_a_smaller_micro_batch() -> None:
    found = [fitted(automatic(60), sized(gib))[1] for gib in (29, 30, 31, 32, 34, 37, 42, 50, 64, 80, 141, 180)]
    sizes, largest = [each.size for each in found], [each.largest or 0 for each in found]
    assert sizes == sorted(sizes)
    assert largest == sorted(largest)
    assert sizes[-1] == 60
    assert largest[-1] > 60


@pytest.mark.slow  # imports torch in two processes
def test_a_later_run_of_a_sweep() -> None:
    """The process group of a launcher outlives a run."""
    expected = fitted(automatic(64), sized(34))[1]
    assert 1 < expected.size < 64
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = fitted(automatic(64), sized(34))[1]
    assert (found, found.largest) == (expected, expected.largest)
    assert torch.distributed.is_initialized()
    with pytest.raises(HostError, match=r"A100 40 GB has 1\.0 GiB"):
        fitted(automatic(64), sized(1))


def test_accumulation_and_global_batch_size_determine_the_rows() -> None:
    device = sized(40)
    (_, accumulated), (_, whole) = fitted(automatic(12, accumulate=4), device), fitted(automatic(48), device)
    assert accumulated == whole
    assert fitted(automatic(5, gpus=2, global_batch_size=96), device)[1] == whole


@pytest.mark.parametrize("gib", [22, 26, 34])
def test_an_explicit_size_is_not_changed(gib: float) -> None:
    """The activations do not fit, which the plan may overestimate; the weights do."""
    cfg = large(micro_batch_size=64, accumulate=3)
    before, after = fitted(cfg, sized(gib))
    assert before == after == MicroBatches(64, 3)
    assert after.largest is None
    assert not fits(cfg, after, sized(gib))


@pytest.mark.parametrize("size", ["auto", 4])
def test_states_larger_than_the_device(size: int | str) -> None:
    cfg = large(micro_batch_size=size, accumulate=None)
    text = error(cfg, SMALL)
    found = re.fullmatch(
        r"A100 40 GB has 20\.0 GiB, but one row per step needs ([\d.]+) GiB according to `bionemo plan`, ([\d.]+) of "
        r"them for weights, gradients and optimizer: on (\d+) GPUs, this layout fits: model\..*",
        text,
    )
    assert found, text
    needed, states, gpus = map(float, found.groups())
    assert states == pytest.approx(STATES, rel=0.01)
    profiler, layout = profiler_of(cfg, SMALL), read_layout(cfg)
    rows = replace(layout, micro_batch_size=1, num_micro_batches=layout.micro_batch_size * layout.num_micro_batches)
    assert needed == pytest.approx(evaluate_layout(profiler, rows, SMALL).memory / 2**30, abs=0.05)
    for count in (1, 2):
        best = compare_layouts(profiler, replace(rows, data=count), SMALL)[0]
        assert best.fits == (count >= gpus)


@pytest.mark.parametrize(
    ("gib", "keys"),
    [
        (20, {"micro_batch_size": "auto", "replica_batch_size": 12, "accumulate": None}),
        (20, {"micro_batch_size": "auto", "global_batch_size": 12, "accumulate": None}),
        (11, {"micro_batch_size": "auto", "global_batch_size": 15, "accumulate": None}),
        (20, {"micro_batch_size": 256, "accumulate": 2}),
    ],
    ids=["replica_batch_size", "global_batch_size", "odd global_batch_size", "micro_batch_size"],
)
def test_the_proposed_layout_fits(gib: float, keys: dict[str, Any]) -> None:
    """The overrides, added to the command on so many GPUs, give a valid run that fits and whose step is not larger."""
    cfg, device = large(**keys), sized(gib)
    before = read_layout(cfg)
    proposal = re.search(r"on (\d+) GPUs, this layout fits: (.+)$", error(cfg, device))
    assert proposal
    cfg.trainer.devices = int(proposal[1])
    for override in proposal[2].split():
        path, value = override.split("=")
        *nodes, name = path.split(".")
        setattr(reduce(getattr, nodes, cfg), name, yaml.safe_load(value))
    assert not check_config(cfg)
    _, after = fitted(cfg, device)
    assert fits(cfg, after, device)
    layout = read_layout(cfg)
    assert after.size * after.count * layout.data <= before.global_batch_size * layout.gpus


def test_recomputation_on_the_same_gpu_is_proposed_first() -> None:
    """With recomputation, one layer at a time has activations and half-precision weights."""
    text = error(automatic(), sized((STATES + 3.8) / 0.92))
    assert "on 1 GPU, this layout fits: " in text
    assert "model.activations_checkpoint_granularity=full" in text


def test_no_layout_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_MAX_GPUS", 1)
    assert error(automatic(), sized(1)).endswith(": use a smaller model or larger GPUs")


def test_an_automatic_size_fits_with_pipeline_parallelism() -> None:
    """The first stage holds the activations of as many micro-batches as there are stages."""
    cfg = automatic(64, gpus=2, pipeline_model_parallel_size=2)
    for gib in (16, 18, 21):
        after = fitted(cfg, sized(gib))[1]
        assert after.count > 1
        assert fits(cfg, after, sized(gib))


@pytest.mark.parametrize(
    ("name", "capability", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), 79.25, "a100-80"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 79.11, "h100"),
        ("NVIDIA H200", (9, 0), 139.81, "h200"),
        ("NVIDIA B200", (10, 0), 178.36, "b200"),
        ("NVIDIA L40S", (8, 9), 44.4, "l40s"),
        ("Tesla V100-SXM2-32GB", (7, 0), 31.73, "v100"),
    ],
)
def test_the_current_gpu_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], gib: float, expected: str
) -> None:
    simulate(monkeypatch, name, capability, gib)
    found, known = current_device(), DEVICES[expected]
    assert found.name == name
    assert found.memory == pytest.approx(1024 * gib, abs=1)
    assert (found.half, found.single, found.bf16) == (known.half, known.single, known.bf16)


@pytest.mark.parametrize(("capability", "bf16"), [((12, 0), True), ((7, 5), False)])
def test_an_unknown_gpu_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bf16: bool
) -> None:
    simulate(monkeypatch, "Some GPU", capability, 16)
    assert current_device() == replace(DEVICES["h100"], name="Some GPU", memory=16 * 1024, bf16=bf16)


def simulate(patch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], gib: float) -> None:
    """Simulate a GPU as device 1 of two."""
    properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30), major=capability[0], minor=capability[1])
    patch.setattr(torch.cuda, "current_device", lambda: 1)
    patch.setattr(torch.cuda, "get_device_properties", {1: properties}.__getitem__)
