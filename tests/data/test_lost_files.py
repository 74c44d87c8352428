# SPDX-License-Identifier: Apache-2.0
"""Data files that are truncated or overwritten during a run cause a one-line error, not a signal."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError, describe
from bionemo.data.clusters import open_clusters
from bionemo.data.loader import StepBatch
from bionemo.data.shards.source import SequenceSource
from bionemo.data.text.corpora import CorpusSplit
from bionemo.data.text.indexed import IndexedTokens
from bionemo.training.module import TrainingModule
from tests.support.runs import FORK, config, train, write_shards
from tests.support.sequence_files import open_sequences

PAGES = 64 << 10  # bytes of data, many pages
READS: list[Callable[[SequenceSource], object]] = [
    lambda source: gather(source, len(source) - 1),
    lambda source: source.text(len(source) - 1),
    lambda source: source.fields(len(source) - 1),
]


def gather(source: SequenceSource, record: int) -> bytes:
    out, counts = np.zeros(int(source.lengths[record]), np.uint8), source.lengths[[record]].astype(np.int64)
    source.gather(np.array([record]), np.zeros(1, np.int64), counts, out, np.zeros(1, np.int64))
    return out.tobytes()


def write(directory: Path, name: str) -> SequenceSource:
    path = directory / name
    if name.endswith(".csv"):
        path.write_text("id,sequence\n" + "".join(f"{i},{'MKV' * 20}\n" for i in range(PAGES // 60)))
        return open_sequences("csv_fields_mmap", [path], data_fields={"sequence": 1, "id": 0})
    path.write_text("".join(f">{i}\n{'MKV' * 20}\nMKV\n" for i in range(PAGES // 60)))
    return open_sequences("fasta_fields_mmap", [path])


@pytest.mark.parametrize("read", READS, ids=["gather", "text", "fields"])
@pytest.mark.parametrize("name", ["x.csv", "x.fasta"])
def test_a_truncated_shard_is_an_error(tmp_path: Path, name: str, read: Callable[[SequenceSource], object]) -> None:
    source = write(tmp_path, name)
    read(source)
    os.truncate(tmp_path / name, 5)
    with pytest.raises(UserError, match=f"{tmp_path / name} was truncated"):
        read(source)


def test_only_shards_that_are_read_are_checked(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.csv" for name in "ab"]
    for path in paths:
        path.write_text("id,sequence\n1,MKV\n")
    source = open_sequences("csv_mmap", paths, data_col=1)
    os.truncate(paths[1], 5)
    assert gather(source, 0) == b"MKV"
    with pytest.raises(UserError, match=r"b\.csv was truncated"):
        gather(source, 1)


def test_an_overwritten_shard_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path, "x.fasta")
    size = (tmp_path / "x.fasta").stat().st_size
    with (tmp_path / "x.fasta").open("r+b") as file:
        file.write(b"M\n" * (size // 2))
    with pytest.raises(UserError, match=r"x\.fasta was overwritten while it was in use"):
        gather(source, len(source) - 1)


def test_a_change_of_a_few_letters_of_a_large_shard_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_bytes(b"".join(b">%05d\nMKVLAWGMKVLAWGMKVLAWGMKVLAWG\n" % number for number in range(40_000)))
    source = open_sequences("fasta_fields_mmap", [path])
    wait_for_clock(path)
    for place in range(20_007, path.stat().st_size, 50_000):  # between the blocks whose hash identifies an index
        with path.open("r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(b"Y")
        with pytest.raises(UserError, match=r"x\.fasta was overwritten while it was in use"):
            gather(source, 7)
        wait_for_clock(path)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(old)
        gather(source, 7)
        wait_for_clock(path)


@pytest.mark.parametrize("read", READS, ids=["gather", "text", "fields"])
@pytest.mark.parametrize("name", ["x.csv", "x.fasta"])
def test_other_sequences_of_the_same_length_are_an_error(
    tmp_path: Path, name: str, read: Callable[[SequenceSource], object]
) -> None:
    source, path = write(tmp_path, name), tmp_path / name
    text = path.read_text()
    wait_for_clock(path)
    path.write_text(text)  # the same content again, as `touch` and `cp` would do
    read(source)
    wait_for_clock(path)
    path.write_text(text.replace("MKV", "AAA"))
    with pytest.raises(UserError, match=f"{path} was overwritten while it was in use"):
        read(source)


def test_a_file_that_replaces_a_shard_does_not_change_the_run(tmp_path: Path) -> None:
    source, path = write(tmp_path, "x.fasta"), tmp_path / "x.fasta"
    (tmp_path / "new").write_text(">other\nAAA\n")
    (tmp_path / "new").rename(path)
    assert gather(source, 0) == b"MKV" * 21


def wait_for_clock(path: Path) -> None:
    """Wait until a write gives the file another modification time."""
    probe = path.with_name("probe")
    while True:
        probe.write_text("")
        if probe.stat().st_mtime_ns != path.stat().st_mtime_ns:
            return
        time.sleep(0.001)


def test_a_truncated_text_corpus_is_an_error(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for _ in range(20):
        builder.add_document(np.arange(2_000, dtype=np.uint16), [2_000])
    builder.finalize(str(tmp_path / "text.idx"))
    corpus = IndexedTokens(tmp_path / "text")
    split = CorpusSplit(corpus, 0, 20)
    assert split.read(np.array([39_990]), 10).tolist() == [list(range(1990, 2000))]
    os.truncate(tmp_path / "text.bin", 100)
    with pytest.raises(UserError, match=r"text\.bin was truncated from 80,000 to 100 bytes while it was in use"):
        split.read(np.array([39_990]), 10)
    with pytest.raises(UserError, match=r"text\.bin was truncated"):
        corpus.document_start(19)


def test_truncated_cluster_files_are_an_error(tmp_path: Path) -> None:
    np.arange(5_000, dtype=np.uint64).tofile(tmp_path / "starts.mmap")
    np.ones(5_000, np.uint64).tofile(tmp_path / "counts.mmap")
    clusters = open_clusters(tmp_path, 1, None, 5_000)
    assert clusters.sample(np.zeros(1, np.int64), np.array([4_999])).tolist() == [4_999]
    os.truncate(tmp_path / "counts.mmap", 8)
    with pytest.raises(UserError, match=r"counts\.mmap was truncated"):
        clusters.sample(np.zeros(1, np.int64), np.array([4_999]))


def _gather_truncated(directory: Path) -> None:
    source = write(directory, "x.csv")
    os.truncate(directory / "x.csv", 5)
    try:
        gather(source, len(source) - 1)
    except UserError:
        os._exit(3)


def test_no_signal_ends_the_process(tmp_path: Path) -> None:
    process = FORK.Process(target=_gather_truncated, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_truncated_data_ends_with_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    shards = tmp_path / "shards"
    write_shards(shards, 1, 500)
    step = TrainingModule.training_step

    def cut_short(self: TrainingModule, batch: StepBatch) -> None:
        if self.trainer.global_step == 2:
            os.truncate(shards / "train" / "x000.csv", 5)
        step(self, batch)

    monkeypatch.setattr(TrainingModule, "training_step", cut_short)
    monkeypatch.setattr("bionemo.data.loader._TOKENS_PER_CALL", 1)  # one step per call
    overrides = [f"model.data.dataset_path={shards}", "model.data.dataset.train=x000", "model.data.dataset.val=x000",
             "trainer.max_steps=100", "trainer.val_check_interval=100",
             f"model.data.num_workers={workers}"]  # fmt: skip
    with pytest.raises((UserError, RuntimeError)) as caught:
        train(config(tmp_path / "run", *overrides, model="esm1nv"))
    line = describe(caught.value) or ""
    if workers and isinstance(caught.value, RuntimeError):  # one read the file between its check and the truncation
        assert "Bus error" in line and "a data file was truncated while it was read" in line
    else:
        assert re.fullmatch(r"\S*/x000\.csv was truncated from .* while it was in use.*", line)
