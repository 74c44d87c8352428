# SPDX-License-Identifier: Apache-2.0
"""A preparation on a Ray cluster of two hosts writes the bytes of a preparation in one process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bionemo.preparation.manifest import verify
from tests.launch.hosts import AVAILABLE, address, ray_cluster
from tests.support.preparation import shards

pytestmark = pytest.mark.skipif(not find_spec("ray"), reason="needs Ray")
needs_hosts = pytest.mark.skipif(not AVAILABLE, reason="network namespaces need root")
RECORDS = 200_000
OPTIONS = ("val_size=500", "test_size=2000", "num_csv_files=5", "on_letters=strip", "on_duplicate=skip")
Cluster = tuple[list[list[str]], dict[str, str], list["subprocess.Popen[bytes]"]]


def run(command: list[str], place: Path, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "bionemo.preprocess", *command] if command[0] != "nsenter" else command,
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(process: "subprocess.Popen[str]") -> str:
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    return text


def sums(output: Path) -> dict[str, str]:
    assert verify(output) == []
    return {name: sha256(data).hexdigest() for name, data in shards(output).items()}


def local(place: Path) -> dict[str, str]:
    """The checksums of the shards of one process."""
    if not (place / "local").exists():
        finished(run(["source=x.fasta", *OPTIONS, "output=local", "num_preprocess_workers=1"], place))
    return sums(place / "local")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with 60 MB of proteins, some of which are repeated, and some thousand molecules."""
    directory = tmp_path_factory.mktemp("shared")
    rng = np.random.default_rng(0)
    letters = rng.choice(np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8), 1 << 20).tobytes()
    with (directory / "x.fasta").open("wb") as file:
        for number, (start, length) in enumerate(rng.integers(0, (1 << 20) - 600, (RECORDS, 2)).tolist()):
            piece = letters[start : start + 20 + length % 500]
            file.write(b">n%d\n%b%b\n" % (number - (number % 1000 == 7), piece, b"*" * (number % 100 == 0)))
    rows = (f"{'C' * (1 + number % 37)}{'N' * (1 + number % 41)}O\tm{number}\n" for number in range(5000))
    (directory / "x.smi").write_text("".join(rows))
    return directory


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with ray_cluster(place) as (hosts, environment, members):
        environment |= {"RAY_ADDRESS": f"{address(1)}:6379"}
        until = time.monotonic() + 60
        command = [*hosts[0], sys.executable, "-c", "import ray; ray.init(); assert len(ray.nodes()) == 2"]
        probe = {**environment, "RAY_AUTH_MODE": "token"}
        while subprocess.run(command, env=probe, capture_output=True, check=False).returncode:
            assert time.monotonic() < until, "the cluster did not start"
        yield hosts, environment, members


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("kind", ["sequences", "zinc15"])
def test_two_hosts_write_the_bytes_of_one_process(kind: str, place: Path, cluster: Cluster) -> None:
    hosts, environment, _ = cluster
    more: Any = {
        "sequences": ["source=x.fasta", *OPTIONS],
        "zinc15": ["--config-name=zinc15", "source=x.smi", "train_size=2000", "val_size=50", "test_size=50"],
    }[kind]
    finished(run([*more, f"output=local-{kind}", "num_preprocess_workers=1"], place))
    command = [*hosts[0], sys.executable, "-m", "bionemo.preprocess"]
    finished(run([*command, *more, f"output=ray-{kind}", "engine=ray"], place, environment))
    assert sums(place / f"ray-{kind}") == sums(place / f"local-{kind}")


@pytest.mark.slow
@needs_hosts
def test_a_host_is_lost(place: Path, cluster: Cluster) -> None:
    hosts, environment, members = cluster
    command = [*hosts[0], sys.executable, "-m", "bionemo.preprocess", "source=x.fasta", *OPTIONS]
    process = run([*command, "output=lost", "engine=ray"], place, environment)
    until = time.monotonic() + 120
    while not list(place.glob("lost/.preparing-*/scratch/shards/*.rows")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    os.killpg(members[1].pid, signal.SIGKILL)
    finished(process)
    assert sums(place / "lost") == local(place)


@pytest.mark.slow  # it waits
def test_there_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">a\nMKT\n>b\nMKV\n>c\nMKW\n")
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    process = run(["source=x.fasta", "output=out", "engine=ray", "val_size=1", "test_size=1"], tmp_path, environment)
    text = process.communicate(timeout=180)[0]
    assert process.returncode == 1
    assert text.splitlines()[-1].startswith(
        "error: no Ray cluster responded at 127.0.0.1:1 within 60 seconds: start"
    ), text
    assert not (tmp_path / "out").exists()
