# SPDX-License-Identifier: Apache-2.0
"""The benchmark of GPUs: its tables, and the whole protocol on a CPU with tiny models."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bionemo.config.compose import load
from tests.conftest import EXAMPLES, ROOT

SCRIPTS = ROOT / "scripts" / "benchmark"


@cache
def script(name: str) -> ModuleType:
    """Import a benchmark, which is not part of a package."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        spec.loader.exec_module(module)
    return module


REPORT = """<testsuites><testsuite>
<testcase name="test_fp32_gradients[esm2nv-eager-plain]"><properties><property name="difference" value="3e-6"/></properties></testcase>
<testcase name="test_fp32_gradients[gpt3-eager-plain]"><properties><property name="difference" value="2e-5"/></properties><failure/></testcase>
<testcase name="test_memory[esm2nv]"><properties><property name="planned" value="200"/><property name="measured" value="190"/></properties></testcase>
<testcase name="test_memory[gpt3]"><skipped/></testcase>
<testcase name="test_fp16_training[esm2nv]"/>
<testcase name="test_fp16_training[gpt3]"><error/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_summary_of_tests() -> None:
    assert script("gpu").summarize_tests(ElementTree.fromstring(REPORT)) == [
        ("fp32 gradients", "1", "1", "0", "3e-06 to 2e-05"),
        ("memory", "1", "0", "1", "0.95 to 0.95"),
        ("fp16 training", "1", "1", "0", ""),
    ]


def test_row_of_training_steps() -> None:
    """Medians of the runs; cells without measurement are empty."""
    ours = [
        {"value": value, "mfu": 0.5, "ms_per_step": 20.0, "host_ms": 4.0, "peak_gib": 10.0}
        for value in (3000.0, 1000.0, 2000.0)
    ]
    found = {("m", "ours"): ours, ("m", "hf"): [{"value": 500.0}], ("m", "ours without dropout"): [{"value": 2500.0}]}
    row = script("gpu").describe_steps
    assert row("m", found) == ("m", "2,000", "50%", "20.0", "4.0", "10.0", "500", "4.0", "0.80")
    assert row("m", {key: [] for key in found}) == ("m", *8 * ("",))


def test_a_section_is_inserted_before_the_first_one(tmp_path: Path) -> None:
    gpu, path = script("gpu"), tmp_path / "RESULTS.md"
    gpu.add_section(path, "## first\n")
    gpu.add_section(path, "\n".join(["## second", "", *gpu.table("a | b", [("1", "2")])]))
    assert path.read_text() == "# Measurements\n\n## second\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n## first\n"


def test_commands_of_the_protocol() -> None:
    protocol = script("gpu").Protocol(1, "cpu")
    done = protocol.run("device", "-c", "import os; print(os.environ['BIONEMO_TEST_DEVICE'])")
    assert done.stdout == "cpu\n"
    assert protocol.read("value", "-c", "print('a line'); print('{\"value\": 3}')") == {"value": 3}
    assert protocol.run("failed tests", "-c", "raise SystemExit(1)", "pytest").returncode == 1
    assert protocol.skipped == []

    assert protocol.run("failure", "-c", "import sys; print(1); sys.exit('first line\\nreason')") is None
    assert protocol.run("no tests", "-c", "print('usage'); raise SystemExit(4)", "pytest") is None
    protocol.end = time.monotonic() + 9
    assert protocol.read("late", "-c", "print(1)") is None
    assert protocol.skipped == ["failure: reason", "no tests: usage", "late: no time left"]


def test_a_command_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    protocol = script("gpu").Protocol(1, "cuda")
    assert protocol.run("command", "-c", "", limit=20) is None
    assert protocol.skipped == ["command: took longer than 20 s"]


def test_measurements_of_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, without dropout and the peer's, in turn and twice on a GPU; without a peer, ours only."""
    gpu, calls = script("gpu"), []

    def read(_: object, name: str, program: str, *arguments: str) -> dict[str, Any] | None:
        assert Path(program).is_file()
        calls.append((name, *arguments))
        return None if name == "gpt3 hf" else {"value": 2.0 * len(name), "kernels": {"attention": 0.5}}

    monkeypatch.setattr(gpu.Protocol, "read", read)
    protocol = gpu.Protocol(1, "cuda")
    protocol.has_peer = True
    rows = {row[0]: row for row in protocol.steps()}
    assert list(rows) == [model for model, *_ in gpu.STEPS] == list(protocol.kernels)
    common = "--device", "cuda", "--compile", "--precision", "bf16-mixed"
    assert calls[:3] == [
        ("esm2_8M ours", "esm2_8M", "ours", "--rows", "128", *common, "--profile"),
        ("esm2_8M hf", "esm2_8M", "hf", "--rows", "64", *common),
        ("esm2_150M ours", "esm2_150M", "ours", "--rows", "64", *common, "--profile"),
    ]
    dropout = "--override", "model.hidden_dropout=0.0", "--override", "model.attention_dropout=0.0"
    assert ("gpt3 ours without dropout", "gpt3", "ours", "--rows", "16", *common, *dropout) in calls
    assert len(calls) == 2 * (8 + 8 + 4)
    assert sum("--profile" in call for call in calls) == 8
    assert rows["esm2_8M"] == ("esm2_8M", "24", "", "", "", "", "20", "1.2", "")
    assert rows["gpt3"] == ("gpt3", "18", "", "", "", "", "", "", "0.36")

    calls.clear()
    protocol = gpu.Protocol(1, "cpu")
    protocol.has_peer = False
    protocol.steps()
    assert calls[0] == ("esm2_8M ours", "esm2_8M", "ours", "--rows", "4", "--device", "cpu", "--tiny", "--steps=2",
                        "--precision", "32", "--profile")  # fmt: skip
    assert len(calls) == 8 + 4


@pytest.mark.parametrize(
    ("tests", "error"),
    [
        ([("memory", "1", "0", "2", "")], None),
        ([("memory", "1", "1", "2", "")], "error: tests failed"),
        ([], "error: tests failed"),
    ],
)
def test_failed_tests_end_the_protocol_after_the_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tests: list[tuple[str, ...]], error: str | None
) -> None:
    gpu, path = script("gpu"), tmp_path / "RESULTS.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", f"--output={path}"])
    monkeypatch.setattr(gpu.Protocol, "test", lambda _: tests)
    monkeypatch.setattr(gpu.Protocol, "steps", lambda protocol: protocol.skipped.append("esm1nv hf: reason") or [])
    monkeypatch.setattr(gpu.Protocol, "kernels", {"gpt3": {"attention": 0.25, "other": 0.75}}, raising=False)
    monkeypatch.setattr(gpu.Protocol, "embedding", lambda _: [("ESM2-8M", "30", "10", "3.0")])
    with pytest.raises(SystemExit, match=error) if error else nullcontext():
        gpu.main()
    lines = path.read_text().splitlines()
    assert lines[-3:] == ["Not measured:", "", "* esm1nv hf: reason"]
    assert {"| gpt3 | attention 25%, other 75% |", "| ESM2-8M | 30 | 10 | 3.0 |"} < set(lines)
    assert ("| memory | 1 | 0 | 2 |  |" in lines) is (error is None)


def test_a_machine_without_gpu_or_with_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = script("gpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: this machine has no GPU; --device=cpu"):
        gpu.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(SystemExit, match=r"error: torch 2\.10\.1 is too old"):
        gpu.main()


def configured(*overrides: str) -> Any:
    """Return the configuration of a model with two layers of size 8."""
    sizes = ["model.num_layers=2", "model.hidden_size=8", "model.ffn_hidden_size=32", "model.num_attention_heads=2"]
    given = ["model.data.dataset_path=none", *sizes, *overrides]
    return load("pretrain_esm2_8M", given, EXAMPLES / "esm2nv" / "conf").model


def test_flops_of_a_step() -> None:
    """Two layers of size 8 with 32 inner channels: 4 * 64 + 2 * 8 * 32 = 768 weights each."""
    steps, model = script("steps"), configured()
    batch = steps.Batch(np.array([10, 30]), None, 1, all_targets=False)
    layers, attention, head = 6 * 2 * 768 * 40, 12 * 2 * 8 * (100 + 900), 6 * 6 * 8 * 100
    assert steps.useful_flops(model, batch, 100) == pytest.approx(layers + attention + head)
    causal = steps.Batch(np.array([10, 30]), None, 1, all_targets=True)
    head = 6 * 40 * 8 * 100
    assert steps.useful_flops(model, causal, 100) == pytest.approx(layers + attention / 2 + head)
    both = steps.Batch(np.array([4, 6]), np.array([10, 30]), 1, all_targets=True)
    pairs = 100 + 900 + (16 + 36) / 2 + 4 * 10 + 6 * 30
    weights = 6 * 2 * (768 * (40 + 10) + 128 * (40 + 10)) + 6 * 10 * 8 * 100  # keys and values: of encoder tokens
    assert steps.useful_flops(model, both, 100) == pytest.approx(weights + 12 * 2 * 8 * pairs)


def whole_rows(lengths: NDArray[np.int64], batches: list[NDArray[np.int64]], limit: int) -> None:
    """Check that batches hold these sequences in order, each as many as fit."""
    end = 0
    for batch in batches:
        begin, end = end, end + len(batch)
        assert batch.tolist() == lengths[begin:end].tolist()
        assert batch.sum() <= limit < lengths[begin : end + 1].sum()


def test_sequences_of_the_batches() -> None:
    """Rows of proteins and text are full, those of molecules have one sequence."""
    steps, model = script("steps"), configured("model.seq_length=512")
    lengths = steps.lengths_of("proteins", model, 1000)
    assert lengths.max() == 512
    for rows in range(1, 12):
        batches = steps.batches_of("proteins", model, rows)
        whole_rows(lengths, [batch.inputs for batch in batches], rows * 512)
        assert not any(batch.all_targets for batch in batches)

    text = steps.batches_of("text", model, 3)
    assert [batch.inputs.tolist() for batch in text] == 4 * [[512, 512, 512]]
    assert all(batch.all_targets for batch in text)

    molecules = steps.batches_of("molecules", model, 3)
    assert [len(batch.inputs) for batch in molecules] == 4 * [3]
    assert all((batch.inputs == batch.source + 1).all() for batch in molecules)
    assert molecules[0].tokens == int((2 * molecules[0].source + 1).sum())


@pytest.mark.parametrize(("decoder_row", "full"), [(32, "inputs"), (128, "source")])
def test_sequences_of_the_batches_of_a_decoder(decoder_row: int, full: str) -> None:
    """A batch ends at the sequence that no longer fits the rows of the encoder or those of the decoder."""
    steps, model = script("steps"), configured("model.seq_length=128")
    model.data.seq_length_dec = decoder_row
    batches = steps.batches_of("spans", model, 3)
    for batch in batches:
        assert batch.inputs.tolist() == [2 * max(round(0.15 * size), 1) + 1 for size in batch.source.tolist()]
        assert batch.inputs.sum() <= 3 * decoder_row
        assert batch.source.sum() <= 3 * 128
    parts, limit = [getattr(batch, full) for batch in batches], 3 * (decoder_row if full == "inputs" else 128)
    whole_rows(np.append(np.concatenate(parts), limit), parts, limit)  # the sequence after the last batch is not known


def cells(section: str, title: str) -> dict[str, list[str]]:
    """Return the cells of a table below a title, by the first cell of a row."""
    table = section.partition(f"### {title}\n")[2].partition("###")[0]
    rows = [row[2:-2].split(" | ") for row in re.findall(r"^\| .* \|$", table, re.M)]
    return {name: rest for name, *rest in rows[1:]}


@pytest.mark.slow
def test_protocol_on_a_cpu(tmp_path: Path) -> None:
    """All tests pass, and every model has numbers, except in columns of GPUs."""
    pytest.importorskip("transformers")
    gpu, path = script("gpu"), tmp_path / "RESULTS.md"
    command = ["bash", str(SCRIPTS / "gpu.sh"), "--device=cpu", f"--output={path}"]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    section = path.read_text()
    assert "Not measured" not in section, section
    tests = cells(section, "Tests")
    for name in ("fp32 gradients", "bf16 gradients", "losses of updates"):
        assert re.fullmatch(r"\S+ to \S+", tests[name][-1]), section
    assert {failed for _, failed, *_ in tests.values()} == {"0"}
    assert tests["memory"] == ["0", "0", tests["memory"][2], ""]  # needs a GPU

    steps, kernels = cells(section, "Training steps"), cells(section, "Kernels of a step")
    models = script("steps").MODELS
    assert list(steps) == list(kernels) == [model for model, *_ in gpu.STEPS]
    for model, row in steps.items():
        ours, mfu, milliseconds, host, peak, peer, ratio, without = row
        assert mfu == peak == ""
        measured = [float(cell.replace(",", "")) for cell in (ours, milliseconds, host, peer, ratio)]
        assert min(measured) > 0, row
        assert float(ratio) == pytest.approx(measured[0] / measured[3], abs=0.06)
        benchmark = models[model]
        given = [*benchmark.overrides, *["model.data.dataset_path=none"] * (benchmark.kind != "text")]
        cfg: Any = load(benchmark.config, given, ROOT / "examples" / benchmark.example / "conf")
        assert bool(without) is (cfg.model.hidden_dropout > 0)
        shares = [int(share) for share in re.findall(r" (\d+)%", kernels[model][0])]
        assert sum(shares) == pytest.approx(100, abs=3)
    assert float(cells(section, "Embedding, residues per second")["ESM2-8M"][2]) > 0
