# SPDX-License-Identifier: Apache-2.0
"""Failed writes end with an error that names the file, in every format; no incomplete file remains."""

import errno
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import describe
from bionemo.inference import part_files
from bionemo.inference.input_records import Record
from bionemo.inference.writers import FORMATS, PredictionResults, write_results
from tests.inference.samples import go

SEQUENCES, PARTS = 60, 3


class Named:
    """Records with long names, which HDF5 stores in separate heaps."""

    def read(self, first: int, last: int) -> Iterator[Record]:
        return (Record(f"{'protein' * 10}-{number}", "MKT") for number in range(first, last))


def results(directory: Path, outputs: list[str]) -> PredictionResults:
    files = []
    each, rng = SEQUENCES // PARTS, np.random.default_rng(0)
    for number in range(PARTS):
        columns = {
            "embeddings": rng.random((each, 32), np.float32), "hiddens": rng.random((3 * each, 32), np.float32),
            "tokens": np.full(each, 3, np.int64), "numbers": np.arange(number * each, (number + 1) * each),
        }  # fmt: skip
        files.append(directory / part_files.NAME.format(number))
        part_files.write_part(files[-1], columns, "x")
    return PredictionResults(files, Named(), outputs, {})  # type: ignore[arg-type]


def with_largest_file(size: int, work: Callable[[], None]) -> str:
    """Call a function in a forked process with a file size limit; return the error that ended it, or ""."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            work()
            outcome = ""
        except OSError as error:
            outcome = f"{error.errno} {error.filename}"
        except BaseException:
            outcome = traceback.format_exc()
        os.write(writing, outcome.encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    return outcome if status == 0 else f"signal {os.WTERMSIG(status)}"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_failed_write_is_one_error_in_every_format(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "x.parts"
    directory.mkdir()
    found = results(directory, ["embeddings"] if kind == "csv" else ["embeddings", "hiddens"])
    output = tmp_path / f"x.{kind}"
    write_results(output, kind, found, directory)
    size = output.stat().st_size
    output.write_text("mine")
    before = sorted(directory.iterdir())
    for largest in (0, 1, *range(size // 20, size - 1, size // 20), size - 1):
        outcome = with_largest_file(largest, lambda: write_results(output, kind, found, directory))
        assert outcome == f"{errno.EFBIG} {output}", largest
        assert output.read_text() == "mine"
        assert sorted(directory.iterdir()) == before
    assert with_largest_file(2 * size, lambda: write_results(output, kind, found, directory)) == ""
    assert output.stat().st_size == pytest.approx(size, rel=0.01)


def test_a_part_is_complete_or_missing(tmp_path: Path) -> None:
    columns = {"tokens": np.arange(1000), "numbers": np.arange(1000)}
    file = tmp_path / part_files.NAME.format(0)
    for size in (0, 8, 200, 4096, 16_000):
        outcome = with_largest_file(size, lambda: part_files.write_part(file, columns, "x"))
        assert outcome == f"{errno.EFBIG} {file}"
        assert not list(tmp_path.iterdir())
    part_files.write_part(file, columns, "x")
    assert part_files.count_sequences(file, "x") == 1000
    assert part_files.count_sequences(file, "y") is None
    whole = file.read_bytes()
    for damaged in (b"", whole[:7], whole[:-1], b"\xff" * 100):
        file.write_bytes(damaged)
        assert part_files.count_sequences(file, "x") is None
    assert part_files.count_sequences(tmp_path / "none", "x") is None
    empty = {"tokens": np.zeros(0, np.int64), "numbers": np.zeros(0, np.int64), "begin": np.zeros((0, 1), np.float32)}
    part_files.write_part(file, empty, "x")  # all its sequences were omitted
    assert part_files.count_sequences(file, "x") == 0


def test_a_full_disk_is_one_line_and_the_next_start_resumes(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the third part; the next start computes what is missing."""
    written: list[str] = []
    write_part = part_files.write_part

    def full(path: Path, *rest: object) -> None:
        if len(written) == 2:
            written.append("full")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path.name)
        write_part(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(part_files, "write_part", full)
    with pytest.raises(OSError, match="No space left") as caught:
        go(model, fasta, tmp_path / "x.npz")
    line = describe(caught.value)
    assert line is not None
    assert line.startswith(f"{tmp_path}/x.npz.parts/part-000002.safetensors: No space left on device: free disk space")
    assert not (tmp_path / "x.npz").exists()
    go(model, fasta, tmp_path / "x.npz")
    assert written[3:] == sorted(set(written[3:]) - set(written[:3]))
    assert len(np.load(tmp_path / "x.npz")["id"]) == 10
