# SPDX-License-Identifier: Apache-2.0
"""Each cluster is sampled once per epoch and its members uniformly, for any number of ranks and workers."""

from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chisquare

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.micro_batches import divide_batch
from bionemo.data.clusters import Clusters, open_clusters
from bionemo.data.data_module import SequenceData
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.data.sampler import SampleStream
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES

COUNTS = np.array([1, 2, 3, 5, 8, 1, 4])
MEMBERS = int(COUNTS.sum())
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def clusters(seed: int = 0) -> Clusters:
    return Clusters(np.cumsum(COUNTS) - COUNTS, COUNTS, seed)


def member_name(record: int) -> str:
    """Encode the record number as a sequence."""
    return LETTERS[record // 20] + LETTERS[record % 20] + "AL"


def write_shards(directory: Path, names: list[str], files: int = 2) -> None:
    directory.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(names)), files)):
        rows = [f"{i + 1},r{i},{len(names[i])},{names[i]}\n" for i in part]
        text = "record_id,record_name,sequence_length,sequence\n" + "".join(rows)
        (directory / f"x{number:03}.csv").write_text(text)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Write seven clusters in two shards, in the format of BioNeMo v1 and of the preparation."""
    write_shards(tmp_path / "uf50" / "train", ["MKV"] * len(COUNTS))
    write_shards(tmp_path / "uf50" / "val", ["MKV"] * 4)
    write_shards(tmp_path / "uf90" / "uf90_csvs", [member_name(record) for record in range(MEMBERS)])
    for name, content in (("counts", COUNTS), ("starts", np.cumsum(COUNTS) - COUNTS)):
        content.astype(np.uint64).tofile(tmp_path / "uf50" / "train" / f"{name}.mmap")
    return tmp_path


def data_of(directory: Path, *overrides: str, rank: int = 0, ranks: int = 1) -> SequenceData:
    shards = [f"model.data.dataset.{split}=x[000..001]" for split in ("train", "val", "test")]
    cfg = load(
        "pretrain_esm2_8M",
        [f"model.data.dataset_path={directory}", *shards, "model.data.train.uf90.dataset.uf90_csvs=x[000..001]",
         "model.seq_length=32", "model.data.packing_window=16", "model.data.num_workers=0", *overrides],
        EXAMPLES / "esm2nv" / "conf",
    )  # fmt: skip
    micro_batches = divide_batch(cfg.model, cfg.trainer, ranks, on_gpu=False)
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm2nv"), MaskedDataset, micro_batches)
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=ranks)
    data.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    return data


def drawn(data: list[SequenceData], steps: int) -> list[list[str]]:
    """Return the members in each step from all ranks, sorted."""
    found = []
    for parts in zip(*(islice(rank.train_dataloader(), steps) for rank in data), strict=True):
        names = []
        for batch in (batch for part in parts for batch in part.micro_batches):
            tokens = batch.tokens.long()
            tokens[batch.target_positions] = batch.target_ids
            pieces = tokens[: batch.num_tokens].split(batch.lengths)
            names += [load_tokenizer("esm2nv").decode(piece[1:-1].numpy()) for piece in pieces]
        found.append(sorted(names))
    return found


def test_each_cluster_once_per_epoch_and_members_uniformly() -> None:
    stream = SampleStream(np.arange(len(COUNTS)), seed=3, clusters=clusters(3))
    epochs, records = stream.read(0, 7 * 20_000)
    owner = np.repeat(np.arange(len(COUNTS)), COUNTS)
    for epoch in (0, 1, 19_999):
        assert sorted(owner[records[epochs == epoch]]) == list(range(len(COUNTS)))
    expected = 20_000 / np.repeat(COUNTS, COUNTS)
    assert chisquare(np.bincount(records, minlength=MEMBERS), expected).pvalue > 1e-3
    # consecutive epochs of one cluster are independent, so the pairs are also uniform
    eight = records[owner[records] == 4] - 11
    pairs = np.bincount(eight[:-1] * 8 + eight[1:], minlength=64)
    assert chisquare(pairs).pvalue > 1e-3


def test_a_sample_depends_only_on_seed_epoch_and_cluster() -> None:
    epochs, chosen = np.arange(50).repeat(7), np.tile(np.arange(7), 50)
    together = clusters().sample(epochs, chosen)
    back = np.random.default_rng(0).permutation(350)
    assert np.array_equal(clusters().sample(epochs[back], chosen[back]), together[back])
    assert not np.array_equal(clusters(1).sample(epochs, chosen), together)


def test_excluded_members_are_never_sampled() -> None:
    kept = np.array([0, 2, 3, 4, 6, 9, 10, 12, 17, 21, 22])
    some = clusters().only(kept)
    assert some.counts.tolist() == [1, 1, 2, 3, 2, 0, 2]
    epochs = np.arange(30_000).repeat(6)
    records = some.sample(epochs, np.tile(np.flatnonzero(some.counts), 30_000))
    expected = 30_000 / np.repeat(some.counts, some.counts)
    counts = np.bincount(records, minlength=MEMBERS)
    assert counts[np.setdiff1d(np.arange(MEMBERS), kept)].sum() == 0
    assert chisquare(counts[kept], expected).pvalue > 1e-3


def test_only_training_samples_members(prepared: Path) -> None:
    steps = drawn([data_of(prepared, "model.micro_batch_size=2")], 400)
    counts = Counter(name for step in steps for name in step)
    assert set(counts) == {member_name(record) for record in range(MEMBERS)}
    total = sum(counts.values())
    expected = total / len(COUNTS) / np.repeat(COUNTS, COUNTS)
    observed = [counts[member_name(record)] for record in range(MEMBERS)]
    assert chisquare(observed, expected).pvalue > 1e-3
    assert len(data_of(prepared).dataset("val").split.source) == 4
    assert data_of(prepared).dataset("val").clusters is None


@pytest.mark.parametrize(
    ("ranks", "micro", "workers"), [(1, 2, 2), (2, 2, 0), pytest.param(4, 1, 0, marks=pytest.mark.slow), (2, 2, 1)]
)
def test_ranks_and_workers_change_nothing(prepared: Path, ranks: int, micro: int, workers: int) -> None:
    overrides = [f"model.micro_batch_size={micro}", f"model.data.train.num_workers={workers}"]
    overrides.append(f"trainer.accumulate_grad_batches={4 // (ranks * micro)}")
    reference = drawn([data_of(prepared, "model.micro_batch_size=4")], 12)
    assert drawn([data_of(prepared, *overrides, rank=rank, ranks=ranks) for rank in range(ranks)], 12) == reference


def test_the_first_shards_give_the_first_clusters(prepared: Path) -> None:
    split = data_of(prepared, "model.data.dataset.train=x000").dataset("train")
    assert split.records.tolist() == [0, 1, 2, 3]  # np.array_split puts four of seven into the first
    with pytest.raises(UserError, match="begins with x000"):
        data_of(prepared, "model.data.dataset.train=x001").dataset("train")


def test_uniref50_without_uniref90(prepared: Path) -> None:
    split = data_of(prepared, "model.data.train.sample_from_map=False").dataset("train")
    assert split.clusters is None
    assert split.split.source.text(0) == "MKV"


def test_long_members_can_be_dropped(prepared: Path) -> None:
    shard = prepared / "uf90" / "uf90_csvs" / "x000.csv"
    lines = shard.read_text().splitlines()
    lines[1] = "1,r0,40," + "A" * 40  # the only member of the first cluster
    shard.write_text("\n".join(lines) + "\n")
    split = data_of(prepared, "model.data.long_sequences=drop").dataset("train")
    assert split.records.tolist() == [1, 2, 3, 4, 5, 6]
    assert split.clusters is not None
    assert 0 not in split.clusters.sample(np.zeros(6, np.int64), split.records)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("missing", "no counts.mmap: prepare UniRef50/90 with do_preprocessing=True"),
        ("short", "starts.mmap has 7 clusters, counts.mmap has 6"),
        ("beyond", "have 25 members, but the UniRef90 shards have 24"),
        ("empty", "have empty clusters"),
    ],
)
def test_invalid_cluster_files(prepared: Path, broken: str, message: str) -> None:
    path = prepared / "uf50" / "train" / "counts.mmap"
    counts = COUNTS.astype(np.uint64)
    match broken:
        case "missing":
            path.unlink()
        case "short":
            counts[:-1].tofile(path)
        case "beyond":
            counts[-1] += 1
            counts.tofile(path)
        case "empty":
            counts[2] = 0
            counts.tofile(path)
    with pytest.raises(UserError, match=message):
        data_of(prepared, "model.data.train.sample_from_map=True").dataset("train")


def test_cluster_files_of_v1_are_unsigned(tmp_path: Path) -> None:
    np.array([0, 1], np.uint64).tofile(tmp_path / "starts.mmap")
    np.array([1, 2], np.uint64).tofile(tmp_path / "counts.mmap")
    found = open_clusters(tmp_path, 0, None, 3)
    assert found.starts.tolist() == [0, 1]
    assert found.counts.tolist() == [1, 2]
