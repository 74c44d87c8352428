# SPDX-License-Identifier: Apache-2.0
"""What `auto` means on a host, and the line in which a run names its precision, kernels and micro-batches."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from bionemo.common.errors import HostError
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches, divide_batch
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.megatron import attention
from bionemo.megatron.precision import Precision, resolve_precision
from bionemo.tokenizers import load_tokenizer
from bionemo.training import compilation, progress
from bionemo.training.compilation import is_compiled
from bionemo.training.progress import print_start
from tests.conftest import ROOT, RUNNABLE
from tests.support.runs import config

AUTOMATIC = {"trainer.precision", "model.compile", "model.micro_batch_size"}
ON_PURPOSE = {
    "conf/predict.yaml": {"trainer.precision"},
    "conf/downstream/_base.yaml": {"model.micro_batch_size"},
    "conf/downstream/flip_aav.yaml": {"model.micro_batch_size"},
    "conf/downstream/flip_gb1.yaml": {"model.micro_batch_size"},
    "conf/downstream/flip_meltome.yaml": {"model.micro_batch_size"},
    "conf/downstream/physchem.yaml": {"model.micro_batch_size"},
    "examples/protein/esm2nv/conf/downstream_sec_str_LORA.yaml": {"model.micro_batch_size"},
    "examples/protein/prott5nv/conf/downstream_flip_meltome.yaml": {"model.micro_batch_size"},
    "examples/molecule/megamolbart/conf/downstream_retro_uspto50k.yaml": {"model.micro_batch_size"},
    "examples/own_model/conf/pretrain_own_model.yaml": {"model.micro_batch_size"},
}


@cache
def composed(*overrides: str) -> RunConfig:
    return config(Path("unused"), "model.micro_batch_size=auto", "model.replica_batch_size=8", *overrides)


def sequence_data(size: int, count: int = 1, **changes: Any) -> SequenceData:
    """Return data with the micro-batches that a device would have; `changes` are keys of the model."""
    cfg, vocabulary = composed(), load_tokenizer("esm2nv")
    micro_batches = MicroBatches(size, count)
    return SequenceData(replace(cfg.model, **changes), cfg.trainer, vocabulary, MaskedDataset, micro_batches)


# precision


def simulate_bf16(patch: pytest.MonkeyPatch, supported: bool) -> None:
    """Simulate a GPU; torch can emulate bf16 on every GPU."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported or including_emulation)


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_automatic_precision_of_a_gpu(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str) -> None:
    simulate_bf16(monkeypatch, supported)
    assert resolve_precision("auto").name == expected
    assert resolve_precision("auto", gpu=True).name == expected
    assert resolve_precision("auto", gpu=False).name == "32"  # trainer.accelerator=cpu


@pytest.mark.parametrize("native", [True, False])
def test_automatic_precision_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, native: bool
) -> None:
    features = {"avx2": True, "avx512_bf16": native}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert resolve_precision("auto").name == "32"
    assert caplog.messages == []


def test_an_unused_gpu_does_not_change_the_precision_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_bf16(monkeypatch, supported=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    assert resolve_precision("16-mixed", gpu=False).name == "32"
    assert resolve_precision("16-mixed", gpu=True).name == "16-mixed"


# compilation


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty directory that is the PATH, on a host with Triton and a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilation, "find_spec", lambda name: SimpleNamespace(name=name))
    return tmp_path


def install(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)


def problem_of(gpu: bool) -> str:
    """Return the error of model.compile=True; `auto` must not compile."""
    assert not is_compiled("auto", gpu)
    with pytest.raises(HostError) as caught:
        is_compiled(True, gpu)
    return str(caught.value)


def missing(what: str) -> str:
    return f"model.compile=True needs {what}, which was not found: install it, or set model.compile=False"


def test_compilation_needs_a_compiler(programs: Path) -> None:
    assert problem_of(gpu=True) == missing("a C compiler")
    assert problem_of(gpu=False) == missing("a C++ compiler")
    assert not is_compiled(False, gpu=True)
    assert not is_compiled(False, gpu=False)


def test_compilation_on_a_gpu_needs_triton(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "gcc", "g++")
    monkeypatch.setattr(compilation, "find_spec", lambda name: None)
    assert problem_of(gpu=True) == missing("Triton")
    assert is_compiled(True, gpu=False)


def test_compilation_needs_a_gpu_that_triton_supports(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "gcc", "g++")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert problem_of(gpu=True) == missing("a GPU of compute capability 7.0 or higher")
    assert is_compiled(True, gpu=False)


@pytest.mark.parametrize("compiler", ["gcc", "clang", "cc"])
def test_a_c_compiler_is_enough_on_a_gpu(programs: Path, compiler: str) -> None:
    install(programs, compiler)
    assert is_compiled(True, gpu=True)
    assert is_compiled("auto", gpu=True)
    assert problem_of(gpu=False) == missing("a C++ compiler")


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_a_cpp_compiler_is_enough_on_a_cpu(programs: Path, compiler: str) -> None:
    install(programs, compiler)
    assert is_compiled(True, gpu=False)
    assert not is_compiled("auto", gpu=False)  # on CPUs only on request
    assert problem_of(gpu=True) == missing("a C compiler")


@pytest.mark.parametrize(("variable", "default", "gpu"), [("CC", "gcc", True), ("CXX", "g++", False)])
def test_variables_choose_the_compiler(
    programs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, default: str, gpu: bool
) -> None:
    install(programs, default)
    for value, found in (("mine", False), (f"{default} -O2", True), ("", True), (" ", True)):
        monkeypatch.setenv(variable, value)
        if found:
            assert is_compiled(True, gpu)
        else:
            problem_of(gpu)
    install(programs, "mine")
    monkeypatch.setenv(variable, str(programs / "mine"))
    assert is_compiled(True, gpu)


# the first line of a run


def simulate_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(attention, "find_spec", lambda name: object() if triton else None)
    for module in (attention, progress):
        patch.setattr(module, "fastest_gpu_attention", lambda head_size: "FA2")


def start(
    cfg: RunConfig, precision: str = "bf16-mixed", compiled: bool = False, device: str = "cuda",
    data: SequenceData | None = None,
) -> None:  # fmt: skip
    """Print the first line of a run on eight devices."""
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(world_size=8, strategy=strategy)
    print_start(cfg, trainer, 1234567, Precision(precision), compiled, data or sequence_data(4, 2), None)


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line, without warnings that the log handler of another run prints."""
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "parameters" in line)
    return line


def test_first_line_of_a_run_on_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_gpu(monkeypatch)
    cfg = replace(composed(), name="small")
    start(cfg, compiled=True)
    assert first_line(capsys) == (  # 64 tokens x 4 rows x 2 micro-batches x 8 GPUs
        "small: 1,234,567 parameters, precision bf16-mixed, FlashAttention 2, compiled on 8 x Some GPU, 4,096 tokens "
        "per step, starting from the beginning"
    )
    start(cfg, data=sequence_data(1, 3))
    assert first_line(capsys) == (
        "small: 1,234,567 parameters, precision bf16-mixed, FlashAttention 2 on 8 x Some GPU, 1,536 tokens "
        "per step, starting from the beginning"
    )


def test_first_line_of_a_run_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    start(replace(composed(), name="small"), "32", device="cpu")
    assert first_line(capsys) == (
        "small: 1,234,567 parameters, precision 32 on 8 x cpu, 4,096 tokens per step, starting from the beginning"
    )


@pytest.mark.parametrize(
    ("capability", "triton", "precision", "changes", "expected"),
    [
        ((8, 0), False, "bf16-mixed", {}, "FlashAttention 2"),
        ((8, 0), True, "32", {}, "Triton attention"),
        ((8, 0), True, "16-mixed", {"attention_dropout": 0.1}, "Triton attention"),
        ((8, 0), True, "bf16-mixed", {"kv_channels": 20}, "Triton attention"),
        ((8, 0), False, "32", {}, "Triton is not installed"),
        ((8, 0), False, "bf16-mixed", {"attention_dropout": 0.1}, "Triton is not installed"),
        ((7, 5), True, "16-mixed", {}, "the GPU has a compute capability below 8.0"),
        ((8, 0), True, "bf16-mixed", {"kv_channels": 320}, "a head has 320 channels, more than 256"),
        ((8, 0), True, "32", {"hidden_size": 640}, "a head has 320 channels, more than 256"),  # two heads
    ],
)
def test_the_attention_of_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int], triton: bool, precision: str, changes: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    """The fast kernels cause no warning; the slow one causes one with its reason."""
    simulate_gpu(monkeypatch, capability, triton)
    cfg = composed()
    model = replace(cfg.model, **{"attention_dropout": 0.0, **changes})
    start(replace(cfg, model=model), precision)
    slow = expected not in ("FlashAttention 2", "Triton attention")
    name = "attention one sequence at a time" if slow else expected
    assert f"precision {precision}, {name} on 8 x Some GPU" in first_line(capsys)
    warning = f"attention is computed one sequence at a time, which is slow, because {expected}"
    assert [message for message in caplog.messages if "attention is" in message] == ([warning] if slow else [])


# micro-batches


def validation_rows(data: SequenceData) -> list[list[int]]:
    """Return the tokens of each micro-batch of the validation."""
    return [batch.tokens.tolist() for step in data.val_dataloader()[0] for batch in step.micro_batches]


def test_validation_rows_do_not_depend_on_automatic_micro_batches() -> None:
    expected = validation_rows(sequence_data(8, micro_batch_size=8))
    assert len(expected) > 1
    assert {len(tokens) for tokens in expected} == {8 * 64}
    for size, count in ((8, 2), (16, 1), (64, 1)):
        assert validation_rows(sequence_data(size, count)) == expected


def test_validation_rows_do_not_depend_on_the_device() -> None:
    batch = replace(composed().model, global_batch_size=12)
    gpu, cpu = (divide_batch(batch, composed().trainer, 1, on_gpu) for on_gpu in (True, False))
    assert validation_rows(sequence_data(gpu.size, gpu.count)) == validation_rows(sequence_data(cpu.size, cpu.count))


def test_validation_rows_fit_the_memory() -> None:
    assert {len(tokens) for tokens in validation_rows(sequence_data(2, 4))} == {2 * 64}


def test_an_explicit_micro_batch_size_is_used_for_validation() -> None:
    assert {len(tokens) for tokens in validation_rows(sequence_data(16, micro_batch_size=16))} == {16 * 64}


# configurations


def settings(path: Path) -> set[str]:
    """Return the keys of `AUTOMATIC` to which a file gives another value."""
    text = path.read_text()
    if not re.search(r"\b(precision|compile|micro_batch_size):", text):  # parsing takes long
        return set()
    content = yaml.safe_load(text)
    group = path.parent.name if path.parent.parent.name == "conf" else ""
    tree = {group: content} if group in ("model", "trainer") else content
    found = set()
    for key in AUTOMATIC:
        part, _, name = key.partition(".")
        if (tree.get(part) or {}).get(name, "auto") != "auto":
            found.add(key)
    return found


def test_only_listed_files_set_automatic_keys() -> None:
    files = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("examples/**/conf/**/*.yaml")]
    assert len(files) > 80
    found = {str(path.relative_to(ROOT)): keys for path in files if (keys := settings(path))}
    assert found == ON_PURPOSE


FIRST = {directory: name for directory, name in reversed(RUNNABLE)}  # of each directory


@pytest.mark.parametrize(
    ("directory", "name"),
    [pytest.param(*each, marks=[] if each in FIRST.items() else pytest.mark.slow) for each in RUNNABLE],
    ids=[f"{directory.parent.name}-{name}" for directory, name in RUNNABLE],
)
def test_examples_compose_to_automatic_keys(directory: Path, name: str) -> None:
    own = ON_PURPOSE.get(str((directory / f"{name}.yaml").relative_to(ROOT)), set())
    cfg: RunConfig = load(name, [], directory)
    values = {
        "trainer.precision": cfg.trainer.precision,
        "model.compile": cfg.model.compile,
        "model.micro_batch_size": cfg.model.micro_batch_size,
    }
    assert {key for key, value in values.items() if value != "auto"} == own
