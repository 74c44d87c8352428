# SPDX-License-Identifier: Apache-2.0
"""Parquet files, compared with the lists that were written and with CSV files of the same records."""

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.files import split_files
from bionemo.data.loader import StepBatch
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.data.shards.parquet import Parquet
from bionemo.data.shards.records import TextRecords
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.data.test_data_module import equal

SEQUENCES = ["MKV", None, "ACDEFGHIKL", "", "MK", "mKx", "A" * 5000, "M V"] * 11
TYPES = {
    "string": pa.string(),
    "large string": pa.large_string(),
    "string view": pa.string_view(),
    "bytes": pa.binary(),
    "large bytes": pa.large_binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "dictionary of large strings": pa.dictionary(pa.int8(), pa.large_string()),
    "dictionary of bytes": pa.dictionary(pa.int16(), pa.binary()),
}


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(
    path: Path,
    sequences: Sequence[str | bytes | None],
    kind: pa.DataType | None = None,
    rows: int = 10,
    **options: str,
) -> Path:
    kind = kind or pa.string()
    array = pa.array(sequences, kind.value_type if pa.types.is_dictionary(kind) else kind)
    if pa.types.is_dictionary(kind):
        array = array.dictionary_encode().cast(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(sequences)), "sequence": array}), path, row_group_size=rows, **options)
    return path


def read(*paths: Path, column: str = "sequence", directory: Path | None = None) -> TextRecords:
    return TextRecords(paths, Parquet({"sequence": 1}, proteins=True, column=column), index_mapping_dir=directory)


def texts(source: TextRecords) -> list[str]:
    return [source.text(record) for record in range(len(source))]


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
def test_types_and_row_groups(tmp_path: Path, kind: pa.DataType, rows: int) -> None:
    parts = [SEQUENCES, SEQUENCES[::-1][:50]]
    source = read(*(write(tmp_path / f"x{i}.parquet", part, kind, rows) for i, part in enumerate(parts)))
    expected = [(text or "").replace(" ", "") for part in parts for text in part]
    assert texts(source) == expected
    assert source.lengths.tolist() == list(map(len, expected))
    assert source.fields(2) == {"sequence": "ACDEFGHIKL"}
    out = np.zeros(7, np.uint8)
    source.gather(np.array([6, 2]), np.array([4996, 3]), np.array([4, 3]), out, np.array([0, 4]))
    assert out.tobytes() == b"AAAAEFG"


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "brotli", "lz4"])
def test_codecs(tmp_path: Path, compression: str) -> None:
    source = read(write(tmp_path / "x.parquet", ["MKV", "A" * 999], compression=compression))
    assert texts(source) == ["MKV", "A" * 999]


@cache
def composed() -> RunConfig:
    overrides = ["model.data.dataset_path=.", "model.seq_length=64", "model.data.packing_window=64"]
    return load("pretrain_small", overrides, EXAMPLES / "esm1nv" / "conf")


def config(data_impl: str, directory: Path, files: str, workers: int = 0) -> RunConfig:
    cfg = deepcopy(composed())
    data = cfg.model.data
    data.dataset_path = data.train.dataset_path = str(directory)
    data.train.data_impl, data.train.range, data.train.num_workers = data_impl, files, workers
    return cfg


def steps(data_impl: str, directory: Path, rank: int, ranks: int, workers: int) -> list[StepBatch]:
    cfg = config(data_impl, directory, "x[0..2]", workers)
    vocabulary = load_tokenizer("esm1nv")
    data = SequenceData(cfg.model, cfg.trainer, vocabulary, MaskedDataset, MicroBatches(2, 1))
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=ranks)
    data.trainer = SimpleNamespace(strategy=strategy, training=True)
    first = list(islice(data.train_dataloader(), 9))
    resumed = SequenceData(cfg.model, cfg.trainer, vocabulary, MaskedDataset, MicroBatches(2, 1))
    resumed.trainer, data.position = data.trainer, first[4].next_position
    resumed.load_state_dict(data.state_dict())
    rest = list(islice(resumed.train_dataloader(), 4))
    assert len(rest) == 4 and all(map(equal, first[5:], rest))
    return first


@pytest.mark.parametrize(("rank", "ranks", "workers"), [(0, 1, 0), (0, 1, 2), (0, 2, 0), (1, 2, 1)])
def test_samples_equal_those_of_csv(tmp_path: Path, rank: int, ranks: int, workers: int) -> None:
    random = np.random.default_rng(0)
    for shard in range(3):
        sequences = ["".join(random.choice(list("ACDEFGHIK"), size)) for size in random.integers(0, 90, 50)]
        lines = "".join(f"{i},n{i},{len(text)},{text}\n" for i, text in enumerate(sequences))
        write(tmp_path / "train" / f"x{shard}.parquet", sequences).with_suffix(".csv").write_text(f"a,b,c,d\n{lines}")
    csv, parquet = (steps(each, tmp_path, rank, ranks, workers) for each in ("csv_mmap", "parquet"))
    assert len(csv) == 9 and all(map(equal, csv, parquet))


def test_files_of_a_split(tmp_path: Path) -> None:
    data = config("parquet", tmp_path, "x[0..1]").model.data
    with pytest.raises(UserError, match=r"x0\.parquet, x1\.parquet"):
        split_files(data, "train")
    paths = [write(tmp_path / "train" / f"x{i}.parquet", ["MKV"]) for i in range(2)]
    assert split_files(data, "train") == paths
    read(*paths)
    data.train.range = "x[0..2]"
    with pytest.raises(UserError, match=r"it contains x0\.parquet, x1\.parquet;"):  # not the files beside them
        split_files(data, "train")


def test_the_column_is_configured(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a.b": ["MK"], "sequence": ["VV"], "other": [["A"]]}), path)
    assert texts(read(path, column="a.b")) == ["MK"]
    assert texts(read(path)) == ["VV"]
    assert texts(read(path, column="a.b")) == ["MK"]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("other", ["MK"], r"x\.parquet has no column 'sequence', but other: set data_impl_kwargs\.parquet\.column"),
        ("sequence", [1, 2], r"x\.parquet: column 'sequence' has the type int64: sequences are text or bytes"),
        ("sequence", [["MK"]], r"x\.parquet: column 'sequence' has the type list<element: string>"),
        ("sequence", pa.array([], pa.string()), r"x\.parquet has no rows"),
        *(
            (
                "sequence",
                ["MK"] * 4999 + [f"MK{letter}V", "A"],
                r"row 4999 \(counted from 0\) contains a line end, comma",
            )
            for letter in '\n\r,"'
        ),
        ("sequence", ["MK", "MéK"], r"x\.parquet\.rows-\w+:3 contains"),
    ],
)
def test_unsuitable_columns(tmp_path: Path, column: str, values: object, message: str) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({column: values}), path, row_group_size=100)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "x.parquet", SEQUENCES)
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(UserError, match=r"x\.parquet (cannot be read as parquet \(.*\): copy|is empty)"):
        read(path)
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == ["x.parquet"]


def test_a_damaged_page(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", SEQUENCES, compression="zstd")
    start = pq.ParquetFile(path).metadata.row_group(3).column(1).data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(40))
    with pytest.raises(UserError, match=r"x\.parquet cannot be read as parquet"):
        read(path)


def test_a_file_is_decoded_once_for_each_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = write(tmp_path / "x.parquet", ["MKV", "MK"]), []
    monkeypatch.setattr(
        pq, "ParquetFile", lambda *args, _new=pq.ParquetFile, **kw: opened.append(1) or _new(*args, **kw)
    )
    for _ in range(2):
        assert texts(read(path)) == ["MKV", "MK"] and len(opened) == 1
    write(path, ["MKVV"])
    assert texts(read(path)) == ["MKVV"] and len(opened) == 2
    (rows,) = (each for each in tmp_path.glob("x.parquet.rows-*") if ".idx" not in each.name)
    for damaged in (rows.read_bytes()[:-3], b"", b"other\n,MKVV\n"):
        rows.write_bytes(damaged)
        assert texts(read(path)) == ["MKVV"]
    assert len(opened) == 5


def test_directories_of_the_text_file(tmp_path: Path, user_cache: Path) -> None:
    path = write(tmp_path / "data" / "x.parquet", ["MKV"])
    assert texts(read(path, directory=tmp_path / "maps")) == ["MKV"]
    assert len(list((tmp_path / "maps").rglob("x.parquet.rows-*"))) == 2  # and its index
    blocked = tmp_path / "file"
    blocked.touch()
    assert texts(read(path, directory=blocked / "maps")) == ["MKV"]
    assert len(list(user_cache.rglob("x.parquet.rows-*"))) == 2
    assert [each.name for each in path.parent.iterdir()] == ["x.parquet"]


def test_no_directory_for_the_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(
        UserError, match=r"x\.parquet cannot be copied to a text file \(.*set model\.data\.index_mapping_dir"
    ):
        read(write(tmp_path / "x.parquet", ["MKV"]), directory=blocked / "maps")


def test_memory_does_not_depend_on_the_size_of_a_row_group(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).choice(np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8), (60_000, 500))
    path = write(tmp_path / "x.parquet", [row.tobytes() for row in letters], pa.binary(), rows=60_000)
    assert pq.ParquetFile(path).num_row_groups == 1 and path.stat().st_size > 25 << 20
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert len(read(path)) == 60_000
    finally:
        pa.set_memory_pool(before)
    assert 1 << 20 < pool.max_memory() < 12 << 20
