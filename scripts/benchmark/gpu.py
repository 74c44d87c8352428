# SPDX-License-Identifier: Apache-2.0
"""Compare one GPU with the CPU, measure speed, and write a section of RESULTS.md line by line; see gpu.sh."""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

import bionemo  # noqa: F401  # limits oneDNN, where the CPU needs it

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAMILIES = ("esm2nv", "gpt3", "prott5nv", "megamolbart", "esm1nv", "esm1b")
NO_DROPOUT = ("--override", "model.hidden_dropout=0.0", "--override", "model.attention_dropout=0.0")
PEER = "Hugging Face"


class Measurement(NamedTuple):
    """A command that prints its result as JSON."""

    name: str  # first cell of its row
    script: str
    arguments: tuple[str, ...]
    root: Path = ROOT  # of the checkout whose code runs


def steps(model: str, rows: int, *more: str, root: Path = ROOT) -> Measurement:
    """Measure our training steps, bf16 and compiled."""
    name = " ".join(
        [model, *(["before"] if root != ROOT else []), *(["without dropout"] if NO_DROPOUT[1] in more else [])]
    )
    return Measurement(name, "steps.py", (model, "ours", f"--rows={rows}", "--compile", *more), root)


def peer(model: str, rows: int, padding: str) -> Measurement:
    """Measure those of Hugging Face's model, bf16, without torch.compile."""
    return Measurement(
        f"{model}, {PEER}, {padding}", "steps.py", (model, "hf", f"--rows={rows}", f"--padding={padding}")
    )


def measurements(before: Path | None) -> list[Measurement]:
    """Return all measurements, the most important ones first."""
    large = [*([steps("esm2_650M", 32, root=before)] if before else []), steps("esm2_650M", 32)]
    return [
        *large, *large, steps("esm2_150M", 64), steps("esm2_8M", 128),
        peer("esm2_650M", 8, "bucket"), peer("esm2_650M", 8, "full"), peer("esm2_8M", 64, "bucket"),
        steps("gpt3", 16), steps("gpt3", 16, *NO_DROPOUT), steps("megamolbart", 1024), steps("prott5nv", 64),
        steps("esm1nv", 64), steps("esm1nv", 64, *NO_DROPOUT), steps("megamolbart", 1024, *NO_DROPOUT),
        steps("prott5nv", 64, *NO_DROPOUT), peer("gpt3", 8, "full"),
    ]  # fmt: skip


class Protocol:
    """Runs commands for at most `--minutes`, and writes every result at once.

    Args:
        minutes: nothing starts, and nothing runs, after this time.
        device: `cuda`, or `cpu` for a rehearsal with tiny models.
        output: file to whose beginning the section is added.
    """

    def __init__(self, minutes: float, device: str, output: Path) -> None:
        self.end, self.device, self.tiny = time.monotonic() + 60 * minutes, device, device == "cpu"
        self.output, self.failed = output, False
        text = output.read_text() if output.exists() else "# Measurements\n"
        self._before, mark, rest = text.partition("\n## ")
        self._after, self._lines = mark + rest, [""]

    def write(self, *lines: str) -> None:
        """Add lines to the section."""
        self._lines += lines
        text = "\n".join([self._before.rstrip(), *self._lines, ""]) + self._after
        temporary = self.output.with_name(self.output.name + ".part")
        temporary.write_text(text)
        temporary.replace(self.output)
        print(*lines, sep="\n", flush=True)

    def run(self, arguments: Sequence[str], root: Path = ROOT, limit: float = 240) -> tuple[int, str, str]:
        """Run Python; return status, output and the reason of a failure."""
        left = min(limit, self.end - time.monotonic())
        if left < 5:
            return 1, "", "no time left"
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"BIONEMO_TEST_DEVICE": self.device, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=root, capture_output=True, text=True, timeout=left, check=False,
                env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, "", f"longer than {left:.0f} s"
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1][:200]
        return done.returncode, done.stdout, reason

    def measure(self, each: Measurement, *more: str, limit: float = 240) -> dict[str, Any] | str:
        """Return the result of a measurement, or why there is none."""
        arguments = [*each.arguments, "--device", self.device, *more]
        if each.script == "steps.py":
            arguments += ["--precision", "32" if self.tiny else "bf16-mixed"]
            if self.tiny:
                arguments = [word for word in arguments if word != "--compile" and not word.startswith("--rows")]
                arguments += ["--tiny", "--steps=2", "--rows=4"]
        script = each.root / "scripts" / "benchmark" / each.script
        status, output, reason = self.run([str(script), *arguments], each.root, limit)
        with suppress(ValueError, IndexError):
            found: Any = json.loads(output.strip().splitlines()[-1])
            if status == 0 and isinstance(found, dict):
                return found
        return reason

    def warm_up(self, each: Sequence[Measurement]) -> None:
        """Fill the caches of the compiler, all models at once; failures are those of the measurements."""
        with ThreadPoolExecutor(len(each)) as pool:
            list(pool.map(lambda one: self.measure(one, "--steps=1", limit=120), each))

    def parity(self) -> None:
        """Compare gradients with those of the CPU, all families at once."""
        self.write(
            "### Gradients", "", "Against the CPU (`tests/test_gpu.py -k gradients`), with the largest difference.", ""
        )
        self.write("| family | passed | failed | skipped | fp32 | bf16 |", "|---|---|---|---|---|---|")
        families = FAMILIES[:1] if self.tiny else FAMILIES
        with ThreadPoolExecutor(len(families)) as pool:
            for row in pool.map(self._family, families):
                self.write(f"| {' | '.join(row)} |")

    def _family(self, family: str) -> tuple[str, ...]:
        select = f"gradients and {family}" + (" and not compiled" if self.tiny else "")
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            words = ["-m", "pytest", "-m", "needs_gpu", "tests/test_gpu.py", "-p", "no:cacheprovider", "-k", select]
            _, _, reason = self.run([*words, f"--junit-xml={report}"])
            if not report.exists():
                self.failed = True
                return family, f"not run: {reason}", *4 * ("",)
            row = summarize(family, ElementTree.parse(report).getroot())  # written by pytest
        self.failed |= row[2] != "0" or row[1] == "0"
        return row

    def speed(self, before: Path | None) -> None:
        """Measure training steps."""
        self.write(
            "", "### Training steps", "", "bf16; ours compiled, the peer not. Tokens are those without padding.", ""
        )
        self.write("| model | tokens/s | MFU | ms per step | host ms | peak GiB |", "|---|---|---|---|---|---|")
        for each in measurements(before):
            found = self.measure(each)
            self.write(describe(each.name, found))

    def attention(self) -> None:
        """Measure the kernels of attention for every head size."""
        found = self.measure(
            Measurement("kernels", "attention.py", ("--kernels", *(["--repeats=1"] if self.tiny else [])))
        )
        self.write("", "### Attention, milliseconds of forward and backward pass", "")
        if isinstance(found, str):
            self.write(f"Not measured: {found}")
            return
        names = list(next(iter(found.values())))
        self.write(f"| head size | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|")
        for size, times in found.items():
            self.write(f"| {size} | {' | '.join(f'{times[name]:.2f}' for name in names)} |")

    def embedding(self) -> None:
        """Measure the embedding of proteins by ours and the peer."""
        size, number = ("8M", "32") if self.tiny else ("650M", "4096")
        self.write("", "### Embedding, residues per second", "", "| model | residues/s |", "|---|---|")
        precision = () if self.tiny else ("--precision=bf16-mixed",)
        with tempfile.TemporaryDirectory() as directory:
            self.run([str(HERE / "embedding.py"), "make", directory, "--size", size])
            for name, kind, more in (("ours", "bionemo", ()), (f"{PEER}, sorted by length", "hf", ("--by-length",))):
                arguments = (kind, directory, "--sequences", number, "--batch=64", *precision, *more)
                found = self.measure(Measurement(name, "embedding.py", arguments))
                cell = found if isinstance(found, str) else f"{found['value']:,.0f}"
                self.write(f"| ESM2-{size}, {name} | {cell} |")

    def profile(self) -> None:
        """Measure the share of each kind of kernel."""
        found = self.measure(steps("esm2_650M", 32), "--profile")
        shares = found if isinstance(found, str) else ", ".join(f"{k} {v:.0%}" for k, v in found["kernels"].items())
        self.write("", f"Kernels of a step of ESM2-650M: {shares}.")


def summarize(family: str, report: ElementTree.Element) -> tuple[str, ...]:
    """Return the row of a family: numbers of cases, and the largest difference in each precision."""
    states, largest = {"passed": 0, "failed": 0, "skipped": 0}, {"fp32": 0.0, "bf16": 0.0}
    for case in report.iter("testcase"):
        tags = {child.tag for child in case}
        states["failed" if {"failure", "error"} & tags else "skipped" if "skipped" in tags else "passed"] += 1
        for each in case.iter("property"):
            if each.get("name") == "difference":
                precision = "fp32" if "fp32" in case.get("name", "") else "bf16"
                largest[precision] = max(largest[precision], float(each.get("value", "nan")))
    return family, *(str(number) for number in states.values()), *(f"{value:.2g}" for value in largest.values())


def describe(name: str, found: dict[str, Any] | str) -> str:
    """Return the row of a measurement of training steps."""
    if isinstance(found, str):
        return f"| {name} | not measured: {found.replace('|', '/')} | | | | |"
    cells = [format(found[key], form) if found.get(key) is not None else "" for key, form in (
        ("value", ",.0f"), ("mfu", ".1%"), ("ms_per_step", ",.1f"), ("host_ms", ",.1f"), ("peak_gib", ".1f"),
    )]  # fmt: skip
    return f"| {' | '.join([name, *cells])} |"


def describe_device(device: str) -> str:
    """Return the processor and the versions of libraries."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if importlib.util.find_spec("triton") is not None:
        versions += f", triton {importlib.import_module('triton').__version__}"
    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {versions}"
    properties = torch.cuda.get_device_properties(0)
    capability = f"compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="end after this time")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md", help="file to which the section is added")
    parser.add_argument("--before", type=Path, help="another checkout, whose ESM2-650M is measured in turn with ours")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: this machine has no GPU; --device=cpu runs the protocol with tiny models")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        sys.exit(f"error: torch {torch.__version__} is too old: install 2.11 or newer")
    if options.before and not (options.before / "scripts" / "benchmark" / "steps.py").is_file():
        sys.exit(f"error: --before={options.before} is no checkout of bionemo")

    before = options.before.resolve() if options.before else None
    protocol = Protocol(options.minutes, options.device, options.output)
    kind = "CPU, a rehearsal with tiny models in fp32" if protocol.tiny else "one GPU"
    protocol.write(f"## {datetime.now(timezone.utc):%Y-%m-%d}, {kind}", "", f"{describe_device(options.device)}.", "")
    if not protocol.tiny:
        protocol.warm_up(list(dict.fromkeys(each for each in measurements(before) if "--compile" in each.arguments)))
    protocol.parity()
    protocol.speed(before)
    protocol.attention()
    protocol.embedding()
    protocol.profile()
    protocol.write("")
    if protocol.failed:
        sys.exit("error: tests failed; run `pytest -m needs_gpu tests/test_gpu.py`")


if __name__ == "__main__":
    main()
