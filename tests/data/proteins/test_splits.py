# SPDX-License-Identifier: Apache-2.0
"""Files of a split, and the length policy of each split."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.data.proteins.splits import open_split
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES

HEADER = "record_id,record_name,sequence_length,sequence\n"


def shard(path: Path, sequence: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{HEADER}0,one,{len(sequence)},{sequence}\n")


def first(config_name: str, *overrides: str) -> str:
    cfg = load(config_name, overrides, EXAMPLES / ("esm1nv" if "small" in config_name else "esm2nv") / "conf")
    return open_split(cfg.model.data, "train", 62, load_tokenizer("esm2nv")).source.text(0)


@pytest.mark.parametrize("config_name", ["pretrain_small", "pretrain_esm2_8M"])
def test_plain_shards_need_only_a_dataset_path(config_name: str, tmp_path: Path) -> None:
    shard(tmp_path / "train" / "x000.csv", "MKV")
    assert first(config_name, f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000") == "MKV"


def test_prepared_clusters_take_precedence_over_plain_shards(tmp_path: Path) -> None:
    shard(tmp_path / "train" / "x000.csv", "MKV")
    shard(tmp_path / "uf50" / "train" / "x000.csv", "GGG")
    found = first("pretrain_esm2_8M", f"model.data.dataset_path={tmp_path}", "model.data.train.range=x000")
    assert found == "GGG"


def test_mock_data_ignores_prepared_clusters(tmp_path: Path) -> None:
    shard(tmp_path / "uf50" / "train" / "x000.csv", "GGG")
    (tmp_path / "uf50" / "train" / "counts.mmap").touch()
    mock = ["data@model.data=uniref50_90", f"model.data.dataset_path={tmp_path}", "model.data.data_impl=mock"]
    assert len(first("pretrain_esm2_8M", *mock)) >= 30


def test_another_directory_is_not_replaced(tmp_path: Path) -> None:
    """Only the directory uf50 in `model.data.dataset_path` may be missing, not one that the user names."""
    shard(tmp_path / "train" / "x000.csv", "MKV")
    paths = [f"model.data.dataset_path={tmp_path}", "model.data.train.dataset_path=/wrong/place"]
    with pytest.raises(UserError, match=r"/wrong/place/train"):
        first("pretrain_esm2_8M", *paths, "model.data.dataset.train=x000")


def test_errors_name_missing_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x000\.csv.*x001\.csv"):
        first("pretrain_esm2_8M", f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x[000..001]")


@pytest.mark.parametrize("ending", ["fasta", "fa", "faa"])
def test_fasta_extensions(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"mine.{ending}"
    file.write_text(">a\nMKV\nAA\n")
    options = ["data@model.data=fasta", "model.data.dataset_path=.", f"model.data.dataset.train={file}"]
    assert first("pretrain_small", *options) == "MKVAA"


def test_only_training_crops_at_random_positions(tmp_path: Path) -> None:
    for name in ("train", "val"):
        shard(tmp_path / name / "x000.csv", "M" * 100)
    overrides = [f"model.data.dataset_path={tmp_path}", "model.data.dataset.train=x000", "model.data.dataset.val=x000"]
    cfg = load("pretrain_small", overrides, EXAMPLES / "esm1nv" / "conf")
    notes = [open_split(cfg.model.data, name, 62, load_tokenizer("esm1nv")).notes[0] for name in ("train", "val")]
    assert (
        notes[0]
        == "train data: 1 of 1 sequences (100.0%) are longer than 62 residues and are cropped at a random position"
    )
    assert notes[1] == "val data: 1 of 1 sequences (100.0%) are longer than 62 residues and are truncated"
