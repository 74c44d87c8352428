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
<testcase name="test_bf16_gradients[gpt3-eager-plain]"><properties><property name="difference" value="0.01"/></properties></testcase>
<testcase name="test_bf16_gradients[gpt3-compiled-plain]"><skipped/></testcase>
<testcase name="test_bf16_gradients[gpt3-compiled-dropout]"><error/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_row_of_a_family() -> None:
    row = script("gpu").summarize("gpt3", ElementTree.fromstring(REPORT))
    assert row == ("gpt3", "2", "2", "1", "2e-05", "0.01")


def test_row_of_training_steps() -> None:
    found = {"value": 2345.6, "mfu": 0.5, "ms_per_step": 20.04, "host_ms": 4.0, "peak_gib": 10.0}
    row = script("gpu").describe
    assert row("m", found) == "| m | 2,346 | 50.0% | 20.0 | 4.0 | 10.0 |"
    assert row("m", {"value": 1.0, "mfu": None}) == "| m | 1 |  |  |  |  |"
    assert row("m", "a | b") == "| m | not measured: a / b | | | | |"


def protocol(path: Path, minutes: float = 1, device: str = "cpu") -> Any:
    return script("gpu").Protocol(minutes, device, path / "RESULTS.md")


def test_a_section_is_written_line_by_line_before_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    protocol(tmp_path).write("## first", "")
    assert path.read_text() == "# Measurements\n\n## first\n\n"
    second = protocol(tmp_path)
    second.write("## second", "", "| a |")
    assert path.read_text() == "# Measurements\n\n## second\n\n| a |\n\n## first\n\n"
    second.write("| b |")
    assert path.read_text() == "# Measurements\n\n## second\n\n| a |\n| b |\n\n## first\n\n"
    assert os.listdir(tmp_path) == ["RESULTS.md"]


def test_commands_of_the_protocol(tmp_path: Path) -> None:
    run = (each := protocol(tmp_path)).run
    assert run(["-c", "import os; print(os.environ['BIONEMO_TEST_DEVICE'])"]) == (0, "cpu\n", "cpu")
    assert run(["-c", "import os; print(os.environ['PYTHONPATH'])"], tmp_path)[1].startswith(str(tmp_path))
    assert run(["-c", "import sys; print(1); sys.exit('first line\\nreason')"]) == (1, "1\n", "reason")
    each.end = time.monotonic() + 4
    assert run(["-c", "print(1)"]) == (1, "", "no time left")


def test_a_command_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert protocol(tmp_path).run(["-c", ""], limit=20) == (1, "", "longer than 20 s")


def test_results_of_a_measurement(tmp_path: Path) -> None:
    """The last line is read; anything else is the reason why there is no result."""
    gpu, directory = script("gpu"), tmp_path / "scripts" / "benchmark"
    directory.mkdir(parents=True)
    for text, expected in {
        "import sys; print('a line'); print('{\"value\": 3}')": {"value": 3},
        "raise SystemExit('no memory')": "no memory",
        "print('{\"value\": 3}'); raise SystemExit(1)": '{"value": 3}',
        "print('text')": "text",
    }.items():
        (directory / "steps.py").write_text(text)
        each = gpu.Measurement("m", "steps.py", ("esm2_8M", "ours", "--rows=9", "--compile"), tmp_path)
        assert protocol(tmp_path).measure(each) == expected
    (directory / "steps.py").write_text("import json, sys; print(json.dumps({'words': sys.argv[1:]}))")
    words = protocol(tmp_path).measure(each)["words"]
    assert words == ["esm2_8M", "ours", "--device", "cpu", "--precision", "32", "--tiny", "--steps=2", "--rows=4"]
    words = protocol(tmp_path, device="cuda").measure(each, "--profile")["words"]
    assert words == [*each.arguments, "--device", "cuda", "--profile", "--precision", "bf16-mixed"]


def test_order_of_the_measurements(tmp_path: Path) -> None:
    """The largest model comes first and twice, in turn with another checkout; every model and kind of peer follows."""
    gpu = script("gpu")
    names = [each.name for each in gpu.measurements(tmp_path)]
    assert names[:6] == [*2 * ["esm2_650M before", "esm2_650M"], "esm2_150M", "esm2_8M"]
    assert {"esm2_650M, Hugging Face, bucket", "esm2_650M, Hugging Face, full", "gpt3 without dropout"} < set(names)
    assert [each.name for each in gpu.measurements(None)][:3] == [*2 * ["esm2_650M"], "esm2_150M"]
    assert {each.arguments[0] for each in gpu.measurements(None)} <= set(script("steps").MODELS)


@pytest.mark.parametrize(
    ("row", "error"),
    [(("esm2nv", "1", "0", "2", "", ""), None), (("esm2nv", "1", "1", "2", "", ""), "error: tests failed"),
     (("esm2nv", "0", "0", "2", "", ""), "error: tests failed")],
)  # fmt: skip
def test_failed_tests_end_the_protocol_after_the_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: tuple[str, ...], error: str | None
) -> None:
    gpu, path = script("gpu"), tmp_path / "RESULTS.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", f"--output={path}"])
    monkeypatch.setattr(gpu, "summarize", lambda *_: row)
    monkeypatch.setattr(gpu.ElementTree, "parse", lambda _: ElementTree.ElementTree())

    def run(_: object, arguments: list[str], *__: object) -> tuple[int, str, str]:
        for word in arguments:
            if word.startswith("--junit-xml="):
                Path(word.partition("=")[2]).touch()
        return (
            (0, '{"value": 30, "kernels": {"attention": 0.25, "other": 0.75}}', "")
            if "ours" in arguments
            else (1, "", "x")
        )

    monkeypatch.setattr(gpu.Protocol, "run", run)
    with pytest.raises(SystemExit, match=error) if error else nullcontext():
        gpu.main()
    lines = path.read_text().splitlines()
    for line in (
        f"| {' | '.join(row)} |", "| gpt3 | 30 |  |  |  |  |", "| ESM2-8M, ours | x |",
        "| esm2_8M, Hugging Face, bucket | not measured: x | | | | |",
        "Kernels of a step of ESM2-650M: attention 25%, other 75%.",
    ):  # fmt: skip
        assert line in lines


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


@pytest.mark.slow
def test_protocol_on_a_cpu(tmp_path: Path) -> None:
    """All tests pass, and every measurement has a number."""
    pytest.importorskip("transformers")
    path = tmp_path / "RESULTS.md"
    command = ["bash", str(SCRIPTS / "gpu.sh"), "--device=cpu", f"--output={path}", f"--before={ROOT}"]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    section = path.read_text()
    assert done.returncode == 0, (done.stderr[-3000:], section)
    assert "ot measured" not in section and "not run" not in section
    rows = {row.split(" | ")[0][2:]: row.split(" | ")[1:] for row in re.findall(r"^\| .* \|$", section, re.M)}
    family, passed, failed, *_ = ["esm2nv", *rows["esm2nv"]]
    assert int(passed) > 0 and failed == "0", family
    for each in script("gpu").measurements(ROOT):
        speed, _, milliseconds, host, *_ = rows[each.name]
        assert min(float(cell.replace(",", "")) for cell in (speed, milliseconds, host)) > 0
    assert rows["ESM2-8M, ours"] and rows["ESM2-8M, Hugging Face, sorted by length"]
    shares = [int(share) for share in re.findall(r" (\d+)%", section.rpartition("Kernels of a step")[2])]
    assert sum(shares) == pytest.approx(100, abs=3)
