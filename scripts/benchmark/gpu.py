# SPDX-License-Identifier: Apache-2.0
"""Run the tests and benchmarks of a GPU and write a section of RESULTS.md; see gpu.sh."""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import bionemo  # noqa: F401  # limits oneDNN, where the CPU needs it

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = (  # model, rows of ours, rows of the peer: both fit 80 GB
    ("esm2_8M", 128, 64), ("esm2_150M", 64, 32), ("esm2_650M", 32, 16), ("esm2_3B", 4, 2), ("esm1nv", 64, 32),
    ("prott5nv", 64, 32), ("megamolbart", 1024, 1024), ("gpt3", 16, 8),
)  # fmt: skip
WITHOUT_DROPOUT = ("esm1nv", "prott5nv", "megamolbart", "gpt3")
NO_DROPOUT = ("--override", "model.hidden_dropout=0.0", "--override", "model.attention_dropout=0.0")
Rows = list[tuple[str, ...]]


class Protocol:
    """Runs the steps of the protocol until the time is over."""

    def __init__(self, minutes: float, device: str) -> None:
        self.end, self.device, self.tiny = time.monotonic() + 60 * minutes, device, device == "cpu"
        self.repeats = 1 if self.tiny else 2
        self.skipped: list[str] = []
        self.has_peer = importlib.util.find_spec("transformers") is not None

    def run(self, name: str, *arguments: str, limit: float = 600) -> subprocess.CompletedProcess[str] | None:
        """Run Python with these arguments; return None, and note the name, if it fails or the time is over."""
        left = min(limit, self.end - time.monotonic())
        reason, begin = "no time left", time.monotonic()
        if left > 10:
            try:
                done = subprocess.run(
                    [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=left, check=False,
                    env=os.environ | {"BIONEMO_TEST_DEVICE": self.device},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                reason = f"took longer than {left:.0f} s"
            else:
                print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
                if done.returncode in (0, 1) if "pytest" in arguments else done.returncode == 0:
                    return done
                reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1][:200]
        self.skipped.append(f"{name}: {reason}")
        print(self.skipped[-1], file=sys.stderr)
        return None

    def read(self, name: str, *arguments: str) -> dict[str, Any] | None:
        """Run a benchmark and parse its last line."""
        done = self.run(name, *arguments)
        return None if done is None else json.loads(done.stdout.strip().splitlines()[-1])

    def test(self) -> Rows:
        """Run the tests of GPUs; return the largest recorded value of each test, over its cases."""
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            select = ["-k", "esm2nv and not compiled"] if self.tiny else []
            arguments = ["-m", "pytest", "-m", "needs_gpu", "tests/test_gpu.py", "-p", "no:cacheprovider", *select]
            if self.run("tests", *arguments, f"--junit-xml={report}", limit=900) is None:
                return []
            return summarize_tests(ElementTree.parse(report).getroot())  # written by pytest

    def steps(self) -> Rows:
        """Measure the training steps of every model, ours and the peer's in turn."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        common = ["--device", self.device, *(["--tiny", "--steps=2"] if self.tiny else ["--compile"])]
        common += ["--precision", "32" if self.tiny else "bf16-mixed"]
        for repeat in range(self.repeats):
            for model, rows, peer_rows in STEPS:
                cases = [("ours", rows, ["--profile"] if repeat == 0 else [])]
                cases += [("ours without dropout", rows, [*NO_DROPOUT])] * (model in WITHOUT_DROPOUT)
                cases += [("hf", peer_rows, [])] * self.has_peer
                for name, size, more in cases:
                    arguments = [model, name.split()[0], "--rows", "4" if self.tiny else str(size), *common, *more]
                    result = self.read(f"{model} {name}", str(HERE / "steps.py"), *arguments)
                    if result is not None:
                        found[model, name].append(result)
        self.kernels = {model: each[0].get("kernels") for (model, name), each in found.items() if name == "ours"}
        return [describe_steps(model, found) for model, *_ in STEPS]

    def embedding(self) -> Rows:
        """Measure the embedding of proteins, ours and the peer's in turn."""
        if not self.has_peer:
            self.skipped.append("embedding: transformers, which writes the model, is not installed")
            return []
        size, number = ("8M", 32) if self.tiny else ("650M", 4096)
        script, found = str(HERE / "embedding.py"), defaultdict[str, list[float]](list)
        common = ["--sequences", str(number), "--device", self.device]
        common += [] if self.tiny else ["--precision", "bf16-mixed", "--batch", "64"]
        with tempfile.TemporaryDirectory() as directory:
            if self.run("model for embedding", script, "make", directory, "--size", size) is None:
                return []
            for _ in range(self.repeats):
                for name, more in (("bionemo", []), ("hf", ["--by-length"])):
                    result = self.read(f"embedding {name}", script, name, directory, *common, *more)
                    if result is not None:
                        found[name].append(result["value"])
        if not found["bionemo"] or not found["hf"]:
            return []
        ours, peer = (statistics.median(found[name]) for name in ("bionemo", "hf"))
        return [(f"ESM2-{size}", f"{ours:,.0f}", f"{peer:,.0f}", f"{ours / peer:.1f}")]


def summarize_tests(report: ElementTree.Element) -> Rows:
    """Return a row for each test function: passed cases, failed cases and the extremes of the recorded values."""
    values: dict[str, list[float]] = defaultdict(list)
    states: dict[str, list[str]] = defaultdict(list)
    for case in report.iter("testcase"):
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        tags = [child.tag for child in case]
        failed = "failed" if {"failure", "error"} & set(tags) else "passed"
        states[name].append("skipped" if "skipped" in tags else failed)
        recorded = {each.get("name"): float(each.get("value", "nan")) for each in case.iter("property")}
        if "difference" in recorded:
            values[name].append(recorded["difference"])
        elif "planned" in recorded:
            values[name].append(recorded["measured"] / recorded["planned"])
    rows = []
    for name, found in states.items():
        extremes = f"{min(values[name]):.2g} to {max(values[name]):.2g}" if values[name] else ""
        rows.append((name, *(str(found.count(state)) for state in ("passed", "failed", "skipped")), extremes))
    return rows


def describe_steps(model: str, found: dict[tuple[str, str], list[dict[str, Any]]]) -> tuple[str, ...]:
    """Return the row of a model in the table of training steps."""

    def median(name: str, key: str = "value") -> float | None:
        values = [each[key] for each in found[model, name] if each.get(key) is not None]
        return statistics.median(values) if values else None

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    ours, peer, without = median("ours"), median("hf"), median("ours without dropout")
    return (
        model, text(ours, ",.0f"), text(median("ours", "mfu"), ".0%"), text(median("ours", "ms_per_step"), ",.1f"),
        text(median("ours", "host_ms"), ",.1f"), text(median("ours", "peak_gib"), ".1f"), text(peer, ",.0f"),
        text(ours / peer if ours and peer else None, ".1f"), text(ours / without if ours and without else None, ".2f"),
    )  # fmt: skip


def table(header: str, rows: Rows) -> list[str]:
    """Return the lines of a Markdown table."""
    names = header.split(" | ")
    return [f"| {header} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def describe_device(device: str) -> str:
    """Return the processor and the versions of libraries."""
    triton = importlib.util.find_spec("triton")
    versions = f"torch {torch.__version__}, triton {'installed' if triton else 'not installed'}"
    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {versions}"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}."
        f"{properties.minor}, CUDA {torch.version.cuda}, Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=35, help="do not start anything after this time")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md", help="file to which the section is added")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: this machine has no GPU; --device=cpu runs the protocol with tiny models")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        sys.exit(f"error: torch {torch.__version__} is too old: install 2.11 or newer")

    tiny = options.device == "cpu"
    how = "two layers, fp32, not compiled" if tiny else "bf16, compiled"
    batches = "" if tiny else ", with half as many sequences except for MegaMolBART"
    begin, protocol = time.monotonic(), Protocol(options.minutes, options.device)
    tests, steps, embedding = protocol.test(), protocol.steps(), protocol.embedding()
    minutes, date = (time.monotonic() - begin) / 60, datetime.now(timezone.utc)
    lines = [
        f"## {date:%Y-%m-%d}, {'CPU, a test of the protocol' if protocol.tiny else 'one GPU'}", "",
        f"{describe_device(options.device)}. `bash scripts/benchmark/gpu.sh`, {minutes:.0f} minutes, medians of "
        f"{protocol.repeats} alternating runs.", "",
        "### Tests", "",
        *table("test | passed | failed | skipped | difference from the CPU, or measured / planned memory", tests),
        "### Training steps", "",
        f"Tokens per second without padding, of packed rows in memory, {how}. The peer is Hugging Face's model of the "
        f"same size (sdpa, {how}), padded to the longest sequence of a batch{batches}.", "",
        *table("model | ours | MFU | ms per step | host ms | peak GiB | peer | ratio | relative to no dropout", steps),
        "### Kernels of a step", "",
        *table("model | share of the time", [
            (model, ", ".join(f"{kind} {share:.0%}" for kind, share in kernels.items()))
            for model, kernels in protocol.kernels.items() if kernels
        ]),
        "### Embedding, residues per second", "",
        *table("model | ours | peer, sorted by length | ratio", embedding),
    ]  # fmt: skip
    if protocol.skipped:
        lines += ["Not measured:", "", *(f"* {each}" for each in protocol.skipped), ""]
    add_section(options.output, "\n".join(lines))
    print(f"added a section to {options.output}")
    if any(row[2] != "0" for row in tests) or not tests:
        sys.exit("error: tests failed; run `pytest -m needs_gpu tests/test_gpu.py`")


def add_section(path: Path, section: str) -> None:
    """Insert a section before the first one of a file, or create the file."""
    text = path.read_text() if path.exists() else "# Measurements\n\n"
    before, mark, after = text.partition("\n## ")
    path.write_text(f"{before.rstrip()}\n\n{section}{mark}{after}" if mark else f"{text.rstrip()}\n\n{section}")


if __name__ == "__main__":
    main()
