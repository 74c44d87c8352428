# SPDX-License-Identifier: Apache-2.0
"""Files of every type, damaged in every way: each reader succeeds or reports a one-line error."""

import random
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from bionemo import checkpoint
from bionemo.common.errors import describe
from bionemo.config.compose import load as load_config
from bionemo.data.table import read_table
from bionemo.finetuning.load_head import read_trained_head
from bionemo.formats.convert import convert
from bionemo.formats.convert import describe as inspect
from bionemo.inference.load import load
from bionemo.preparation.manifest import verify
from tests.robustness.commands import Outcomes, Server
from tests.robustness.scenarios import scenarios
from tests.support.sequence_files import open_sequences

pytestmark = pytest.mark.slow
LIMIT = 20  # seconds


def _at(data: bytes, share: float, new: bytes) -> bytes:
    place = int(len(data) * share)
    return data[:place] + new + data[place + len(new) :]


MUTATIONS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "first half": lambda data: data[: len(data) // 2],
    "without the last byte": lambda data: data[:-1],
    "without the first byte": lambda data: data[1:],
    "one byte more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "random": lambda data: random.Random(0).randbytes(len(data)),
    "text": lambda data: b"hello world\n",
    "one line of 5 MB": lambda data: b"A" * 5_000_000,
    "line ends of Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "line ends of old Macs": lambda data: data.replace(b"\n", b"\r"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode("latin1").encode("utf-16"),
    "NUL within": lambda data: _at(data, 0.5, b"\0\0\0\0"),
    "not UTF-8 within": lambda data: _at(data, 0.6, b"\xff\xfe"),
    "quote within": lambda data: _at(data, 0.5, b'"'),
    "large number within": lambda data: _at(data, 0.3, b"99999999999999999999"),
    "negative length at the start": lambda data: b"\xff" * 8 + data[8:],
    "brackets": lambda data: b"[" * 100_000,
    "braces": lambda data: b'{"a":' * 50_000,
    **{f"bit {n}": lambda data, n=n: _flipped(data, n) for n in range(12)},
}


def _flipped(data: bytes, seed: int) -> bytes:
    """Flip a random bit, near the beginning for small seeds."""
    if not data:
        return data
    draw = random.Random(seed)
    place = draw.randrange(min(len(data), 64 << 2 * seed))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


# Replacements of the file.
REPLACED: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to itself": lambda path: path.symlink_to(path),
}


@contextmanager
def limited() -> Iterator[None]:
    """Abort operations that take too long or more than 4 GiB."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it hung")

    before = signal.signal(signal.SIGALRM, late)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), memory[1]))
    signal.alarm(LIMIT)
    try:
        yield
    except MemoryError as error:
        raise AssertionError("it takes all memory") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _read_all(implementation: str, path: Path) -> None:
    source = open_sequences(implementation, [path])
    lengths = np.minimum(source.lengths, 100)
    out = np.zeros(int(lengths.sum()), np.uint8)
    source.gather(np.arange(len(source)), np.zeros_like(lengths), lengths, out, np.cumsum(lengths) - lengths)
    for record in range(min(len(source), 5)):
        source.fields(record)


@pytest.fixture(scope="session")
def originals(model: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one file of every type."""
    place = tmp_path_factory.mktemp("originals")
    shutil.copytree(model, place / "checkpoint")
    convert(place / "checkpoint", place / "model.nemo")
    convert(place / "checkpoint", place / "hf", "hf")
    for name in ("preprocess", "finetune"):
        scenario = scenarios(model)[name]
        directory = place / name
        directory.mkdir()
        scenario.prepare(directory)
        done = server.run(scenario.arguments(directory), directory)
        assert done.status == 0, done.console
    (place / "run.yaml").write_text("defaults:\n  - /pretrain_esm2_8M\n  - _self_\nname: x\n")
    return place


Reader = Callable[[Path], object]
# Type -> the file in `originals`, its reader, and the directory that is copied and passed to the reader.
TYPES: dict[str, tuple[str, str, Reader]] = {
    "fasta": ("preprocess/train.fasta", "", lambda path: _read_all("fasta_fields_mmap", path)),
    "csv shard": ("preprocess/out/shards/train/x000.csv", "", lambda path: _read_all("csv_mmap", path)),
    "table": ("finetune/task/train/x000.csv", "", read_table),
    "preparation manifest": ("preprocess/out/shards/manifest.json", "preprocess/out/shards", verify),
    "head": ("finetune/out/head.safetensors", "", read_trained_head),
    "nemo": ("model.nemo", "", lambda path: load(path, "cpu")),
    "yaml": ("run.yaml", "", lambda path: load_config("run", [], path.parent)),
    **{
        f"checkpoint {name}": (f"checkpoint/{name}", "checkpoint", _read_checkpoint)
        for _read_checkpoint in [lambda path: (checkpoint.find_damage(path), inspect(path), load(path, "cpu"))]
        for name in ("manifest.json", "state.json", "index.json", "tensors-0.safetensors")
    },
    **{
        f"hf {name}": (f"hf/{name}", "hf", _read_hf)
        for _read_hf in [lambda path: (inspect(path), load(path, "cpu"))]
        for name in ("config.json", "model.safetensors", "vocab.txt")
    },
}


@pytest.mark.parametrize("kind", TYPES)
def test_damaged_files(kind: str, originals: Path, tmp_path: Path) -> None:
    file, directory, read = TYPES[kind]
    data = (originals / file).read_bytes()
    outcomes = Outcomes()
    for name in [*MUTATIONS, *REPLACED]:
        case = tmp_path / "case"
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        target = case / Path(file).name
        if directory:
            shutil.copytree(originals / directory, case / "whole")
            target = case / "whole" / Path(file).relative_to(directory)
            target.unlink()
        if name in MUTATIONS:
            target.write_bytes(MUTATIONS[name](data))
        else:
            REPLACED[name](target)
        problem = ""
        try:
            with limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(case / "whole" if directory else target)
        except Exception as error:
            line = describe(error)
            if line is None:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            elif "\n" in line:
                problem = "several lines"
        outcomes.judge(f"{kind}, {name}", problem)
    outcomes.report()
