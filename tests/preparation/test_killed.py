# SPDX-License-Identifier: Apache-2.0
"""After the command is killed with SIGKILL at random times, the next start produces the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from bionemo.preparation.manifest import Manifest, verify
from tests.conftest import ROOT
from tests.support.preparation import prepare, shards

RECORDS, WAIT = 60_000, 60.0  # seconds that a worker may take to notice
OPTIONS = {"val_size": 500, "test_size": 2000, "num_csv_files": 5, "on_letters": "strip"}


def sums(output: Path) -> dict[str, str]:
    return {name: sha256(data).hexdigest() for name, data in shards(output).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB of sequences in lines of 60 letters."""
    rng = np.random.default_rng(0)
    pool = rng.choice(np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8), (4096, 61))
    pool[:, 60] = ord("\n")
    lines = pool.tobytes()
    path = tmp_path_factory.mktemp("source") / "x.fasta"
    with path.open("wb") as file:
        for number, (at, count) in enumerate(zip(*rng.integers(0, (4080, 10), (RECORDS, 2)).T.tolist(), strict=True)):
            star = b"*\n" if number % 100 == 0 else b""
            file.write(b">n%d\n%b%b" % (number, lines[61 * at : 61 * (at + count + 1)], star))
    return path


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checksums of all shards of an uninterrupted run."""
    output = tmp_path_factory.mktemp("undisturbed")
    prepare(source, output / "out", **OPTIONS)
    return sums(output / "out")


class Command:
    """The command; all its processes carry an environment variable."""

    def __init__(self, source: Path, output: Path) -> None:
        self.mark = f"BIONEMO_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        overrides = [f"{key}={value}" for key, value in {"source": source, "output": output, **OPTIONS}.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bionemo.preprocess", *overrides, "num_preprocess_workers=2"],
            cwd=ROOT,
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def family(self) -> Iterator[int]:
        """Return all its living processes, including itself."""
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue

    def kill(self) -> None:
        """Kill the main process only, and wait until its workers have exited."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + WAIT
        try:
            while alive := [*self.family()]:
                assert time.monotonic() < deadline, f"{len(alive)} processes outlive the command"
                time.sleep(0.02)
        finally:
            for process in self.family():
                os.kill(process, signal.SIGKILL)
            self.process.communicate()


def kill_once(source: Path, output: Path, delay: float) -> int:
    """Start the command, kill it some seconds after it has created its staging directory, and check the output.

    Returns:
        Number of processes when it was killed; 0 if it had already finished.
    """
    before = {*output.glob(".preparing-*")}
    command = Command(source, output)
    while {*output.glob(".preparing-*")} <= before and command.process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    running = len([*command.family()]) if command.process.poll() is None else 0
    command.kill()
    found = Manifest.read(output)
    assert found is None or verify(output) == []
    return running


def finish(source: Path, output: Path) -> None:
    command = Command(source, output)
    stdout, errors = command.process.communicate(timeout=600)
    assert command.process.returncode == 0, errors
    assert "x.fasta: 60,000 records read" in stdout or "is prepared already" in stdout
    assert not [*command.family()]
    assert verify(output) == []
    assert {path.name for path in output.iterdir()} - {".prepare.lock"} == {"manifest.json", "test", "train", "val"}


@pytest.mark.slow
def test_killed_repeatedly(tmp_path: Path, source: Path, undisturbed: dict[str, str]) -> None:
    assert len(undisturbed) == 15
    delays = [random.uniform(0, 0.3), random.uniform(0.3, 0.8), random.uniform(0.8, 1.5)]
    print("killed after", delays)
    running = [kill_once(source, tmp_path / "out", delay) for delay in delays]
    assert running[0] and max(running) > 2  # including workers
    finish(source, tmp_path / "out")
    assert sums(tmp_path / "out") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_killed_at_random_times(tmp_path: Path, source: Path, undisturbed: dict[str, str], trial: int) -> None:
    delay = random.uniform(0, 1.5) * (trial + 1) / 20
    print("killed after", delay)
    kill_once(source, tmp_path / "out", delay)
    finish(source, tmp_path / "out")
    assert sums(tmp_path / "out") == undisturbed
