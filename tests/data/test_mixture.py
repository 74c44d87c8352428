# SPDX-License-Identifier: Apache-2.0
"""Mixtures: exact shares at every prefix, and one stream for any number of ranks, workers and restarts."""

import pickle
from collections import Counter
from copy import deepcopy
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.micro_batches import divide_batch
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.files import check_files_exist
from bionemo.data.mixture import PERIOD, MixtureStream, change_shares, round_shares
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.data.test_data_module import sequences, whole_steps
from tests.support.runs import write_shards

SIZES = {"large": 120, "small": 13}  # records of the sources
TINY_SHARES = {f"source{number}": 2.0**-number for number in range(12)}  # the smallest are below 1 / PERIOD


def make_stream(
    quotas: dict[str, int], sizes: dict[str, int], epochs: int | None = None, **more: Any
) -> MixtureStream:
    starts = accumulate(sizes.values(), initial=0)
    records = {name: np.arange(start, start + sizes[name]) for name, start in zip(sizes, starts, strict=False)}
    whole = np.concatenate([*records.values()])
    return MixtureStream(whole, 3, epochs=epochs, **({"sources": records, "segments": [(0, quotas)]} | more))


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ({"a": 7, "b": 3}, {"a": 7000, "b": 3000}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 3334, "b": 3333, "c": 3333}),
        ({"a": 0.00001, "b": 0.99999}, {"a": 1, "b": 9999}),
        ({"a": 1e-9, "b": 1e-9, "c": 0.5, "d": 0.5}, {"a": 1, "b": 1, "c": 4999, "d": 4999}),
        ({"only": 0.2}, {"only": 10_000}),
    ],
)
def test_shares_are_rounded_by_the_largest_remainder(weights: dict[str, float], quotas: dict[str, int]) -> None:
    assert round_shares(weights) == quotas


@pytest.mark.parametrize(
    "weights", [{"a": 0.7, "b": 0.3}, {"a": 1, "b": 2, "c": 4}, {"a": 1, "b": 99_999}, {"only": 1}, TINY_SHARES]
)
def test_every_prefix_has_the_shares(weights: dict[str, float]) -> None:
    quotas = round_shares(weights)
    assert sum(quotas.values()) == PERIOD
    assert min(quotas.values()) >= 1
    draws = 1_000_000
    sizes = dict.fromkeys(quotas, 100_000)
    _, records = make_stream(quotas, sizes).read(0, draws)
    after = np.arange(1, draws + 1)
    for number, quota in enumerate(quotas.values()):
        count = np.cumsum(records // 100_000 == number)
        assert np.abs(count * PERIOD - after * quota).max() < PERIOD  # exact integers: less than one draw


def test_each_source_repeats_its_records_only_after_all_of_them() -> None:
    quotas = round_shares({"large": 0.6, "small": 0.4})
    epochs, records = make_stream(quotas, SIZES).read(0, 1000)
    orders = []
    for name, first in (("large", 0), ("small", SIZES["large"])):
        size = SIZES[name]
        of_source = (records >= first) & (records < first + size)
        for start in range(0, of_source.sum() - size, size):
            this = slice(start, start + size)
            orders.append(tuple(records[of_source][this]))
            assert sorted(orders[-1]) == list(range(first, first + size))
            assert set(epochs[of_source][this]) == {start // size}
    assert len(set(orders)) == len(orders)


def test_the_records_of_a_source_do_not_depend_on_the_other_sources() -> None:
    def own(stream: MixtureStream, first: int) -> list[int]:
        _, records = stream.read(0, 2000)
        return [record - first for record in records.tolist() if first <= record < first + SIZES["small"]][:200]

    alone = own(make_stream({"small": PERIOD}, {"small": SIZES["small"]}), 0)
    assert own(make_stream(round_shares({"large": 0.6, "small": 0.4}), SIZES), SIZES["large"]) == alone
    renamed = {"other": SIZES["small"]}
    assert own(make_stream({"other": PERIOD}, renamed), 0) != alone


@pytest.mark.parametrize("segments", [[(0, (6000, 4000))], [(0, (6000, 4000)), (133, (1, 9999)), (399, (9000, 1000))]])
def test_a_part_of_the_stream_equals_that_part_of_the_whole(segments: list[tuple[int, tuple[int, int]]]) -> None:
    given = [(start, dict(zip(SIZES, quotas, strict=True))) for start, quotas in segments]
    stream = make_stream({}, SIZES, epochs=300, segments=given)
    whole = np.stack(stream.read(0, 10**6))
    assert whole.shape == (2, 300 * 133)
    rng = np.random.default_rng(0)
    for start in (0, 132, 133, 134, 399, 9_999, 10_000, 10_133, 39_899, 39_900, 50_000, *rng.integers(0, 40_000, 20)):
        for length in (0, 1, 7, 300):
            found = np.stack(stream.read(int(start), int(start) + length))
            assert np.array_equal(found, whole[:, start : start + length])


def test_each_segment_has_its_shares_and_sources_continue() -> None:
    first, second = round_shares({"large": 0.9, "small": 0.1}), round_shares({"large": 0.25, "small": 0.75})
    stream = make_stream(first, SIZES, segments=[(0, first), (532, second)])
    epochs, records = stream.read(0, 2000)
    small = records >= SIZES["large"]
    before = np.arange(1, 1469)
    assert np.abs(np.cumsum(small[532:]) - 0.75 * before).max() < 1
    assert abs(small[:532].sum() - 53.2) < 1
    drawn = Counter(zip(epochs[small].tolist(), records[small].tolist(), strict=True))
    assert set(drawn.values()) == {1}
    assert len(drawn) // SIZES["small"] == epochs[small].max()


@pytest.mark.parametrize(
    ("position", "quotas", "expected"),
    [
        (50, {"a": 1}, [(0, {"a": 1})]),
        (0, {"a": 2}, [(0, {"a": 2})]),
        (50, {"a": 2}, [(0, {"a": 1}), (100, {"a": 2})]),
        (100, {"a": 2}, [(0, {"a": 1}), (100, {"a": 2})]),
        (101, {"a": 2}, [(0, {"a": 1}), (200, {"a": 2})]),
    ],
)
def test_new_shares_apply_from_the_next_epoch_on(
    position: int, quotas: dict[str, int], expected: list[tuple[int, dict[str, int]]]
) -> None:
    found = change_shares([(0, {"a": 1})], quotas, position, epoch=100)
    assert found == expected
    assert change_shares(found, quotas, max(position - 1, 0) + 1, epoch=100) == expected  # resumed once more
    # changed back before they apply: as if they had never changed
    assert change_shares(found, {"a": 1}, position, epoch=100) == [(0, {"a": 1})]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("mixture") / name for name in SIZES}
    for name, path in found.items():
        write_shards(path, files=1, rows=SIZES[name])
    return found


def sources(directories: dict[str, Path], **weights: float) -> list[str]:
    return [
        "data=mixture",
        *(f"model.data.dataset.{split}=x000" for split in ("train", "val", "test")),
        *(f"model.data.mixture.{name}.weight={weight}" for name, weight in weights.items()),
        *(f"model.data.mixture.{name}.dataset_path={directories[name]}" for name in weights),
    ]


@cache
def compose(*overrides: str) -> RunConfig:
    small = ["model.seq_length=64", "model.data.packing_window=64", "model.data.num_workers=0", "model.seed=11"]
    return load("pretrain_small", [*small, *overrides], EXAMPLES / "esm1nv" / "conf")


def open_data(cfg: RunConfig, rank: int = 0, ranks: int = 1, micro: int = 4, workers: int = 0) -> SequenceData:
    cfg = deepcopy(cfg)
    cfg.model.micro_batch_size, cfg.trainer.accumulate_grad_batches = micro, None
    cfg.model.data.train.num_workers = workers
    micro_batches = divide_batch(cfg.model, cfg.trainer, ranks, on_gpu=False)
    data = SequenceData(cfg.model, cfg.trainer, load_tokenizer("esm1nv"), MaskedDataset, micro_batches)
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=ranks)
    data.trainer = SimpleNamespace(strategy=strategy, training=True)  # type: ignore[assignment]
    return data


def test_ranks_and_workers_read_the_same_stream(directories: dict[str, Path]) -> None:
    cfg = compose(*sources(directories, large=0.6, small=0.4))
    expected = whole_steps([open_data(cfg)], 20)
    assert expected[-1][1].window_start > 0
    assert whole_steps([open_data(cfg, rank, 2, 2) for rank in range(2)], 20) == expected
    assert whole_steps([open_data(cfg, rank, 4, 1) for rank in range(4)], 20) == expected
    assert whole_steps([open_data(cfg, workers=3)], 20) == expected


def test_resuming_at_any_step_continues_the_stream(directories: dict[str, Path]) -> None:
    cfg = compose(*sources(directories, large=0.6, small=0.4))
    straight = whole_steps([open_data(cfg)], 54)
    saved = open_data(cfg)
    for done in range(50):
        saved.position = straight[done][1]
        resumed = open_data(cfg)
        resumed.datasets = saved.datasets or {"train": saved.dataset("train")}
        resumed.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
        assert whole_steps([resumed], 4) == straight[done + 1 : done + 5]


def test_weights_change_on_resume_from_the_next_epoch_on(
    directories: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Up to that epoch the stream is that of the old weights; then each source continues in its own order."""
    total = sum(SIZES.values())

    def texts(data: SequenceData, steps: int) -> list[Any]:
        rows = data.training_steps().sampler.stream.read(0, steps)
        return list(zip(*map(np.ndarray.tolist, rows), strict=True))

    cfg = compose(*sources(directories, large=0.9, small=0.1))
    first = open_data(cfg)
    steps = whole_steps([first], 60)
    first.position = steps[1][1]
    boundary = -(-first.position.window_end // total) * total
    second = open_data(compose(*sources(directories, large=0.2, small=0.8)))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert f"apply from epoch {boundary // total + 1} of the mixture on" in caplog.text
    assert "in a new order" not in caplog.text
    assert second.position == first.position
    old, new = texts(first, 1000), texts(second, 1000)
    assert new[:boundary] == old[:boundary]
    shares = Counter(record < SIZES["large"] for _, record in new[boundary:])
    assert abs(shares[True] - 0.2 * (1000 - boundary)) < 1
    assert max(Counter(new).values()) == 1  # no source starts again

    second.position = whole_steps([second], 3)[-1][1]
    third = open_data(compose(*sources(directories, large=0.2, small=0.8)))
    caplog.clear()
    third.load_state_dict(pickle.loads(pickle.dumps(second.state_dict())))
    assert "from the checkpoint" not in caplog.text
    assert texts(third, 1000) == new


@pytest.mark.parametrize("change", ["removed", "renamed", "records"])
def test_other_sources_are_another_stream(
    change: str, directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_data(compose(*sources(directories, large=0.9, small=0.1)))
    first.position = whole_steps([first], 3)[-1][1]
    write_shards(tmp_path / "other", files=1, rows=SIZES["small"] + (change == "records"))
    weights = {
        "removed": {"large": 1.0},
        "renamed": {"large": 0.9, "tiny": 0.1},
        "records": {"large": 0.9, "small": 0.1},
    }
    places = (
        directories | {"tiny": tmp_path / "other"} | ({"small": tmp_path / "other"} if change == "records" else {})
    )
    second = open_data(compose(*sources(places, **weights[change])))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert "the sources of model.data.mixture: different from the checkpoint" in caplog.text.replace(
        "training records, ", ""
    ).replace(", training residues", "").replace(", training sequences", "")
    assert second.segments == []


def test_a_source_is_cropped_and_masked_as_it_would_be_alone(directories: dict[str, Path]) -> None:
    """The samples of a source are those of the same data set outside a mixture, in any order among other samples."""
    mixed = open_data(compose(*sources(directories, large=0.5, small=0.5))).dataset("train")
    plain = compose(f"model.data.dataset_path={directories['small']}", "model.data.dataset.train=x000")
    alone = open_data(plain).dataset("train")
    epochs = np.arange(SIZES["small"]) % 3
    expected = alone.tokenize(epochs, np.arange(SIZES["small"]))
    assert expected.inputs.lengths.max() == 64  # some are cropped
    assert len(np.unique(expected.inputs.ids)) > 20
    both = np.stack([mixed.mixture.records["small"], mixed.mixture.records["large"][7 : 7 + SIZES["small"]]], 1)
    found = mixed.tokenize(np.repeat(epochs, 2), both.reshape(-1))
    tokens, one = (np.split(each.inputs.ids, each.inputs.lengths.cumsum()[:-1]) for each in (found, expected))
    assert all(map(np.array_equal, tokens[::2], one))
    assert not any(map(np.array_equal, tokens[1::2], one))
    assert np.array_equal(found.inputs.dropout_keys[::2], expected.inputs.dropout_keys)
    assert len(found.target_ids) > len(expected.target_ids)


def test_every_source_has_its_own_validation_loader(directories: dict[str, Path]) -> None:
    data = open_data(compose(*sources(directories, large=0.9, small=0.1)))
    loaders = data.val_dataloader()
    assert data.source_names == ["large", "small"]
    for name, loader in zip(data.source_names, loaders, strict=True):
        plain = compose(f"model.data.dataset_path={directories[name]}", "model.data.dataset.val=x000")
        (alone,) = open_data(plain).val_dataloader()
        batches = [[batch for step in steps for batch in step.micro_batches] for steps in (loader, alone)]
        assert [list(map(sequences, each)) for each in batches[:1]] == [list(map(sequences, batches[1]))]


def test_keys_of_a_source_replace_those_of_the_data(directories: dict[str, Path], tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "mine.fasta").write_text(">one\nMKV\n")
    own = [
        "model.data.mixture.mine.weight=1", f"model.data.mixture.mine.dataset_path={tmp_path}",
        "model.data.mixture.mine.data_impl=fasta_fields_mmap", "model.data.mixture.mine.dataset.train=mine",
        "model.data.mixture.large.data_impl_kwargs.csv_mmap.data_col=3",
    ]  # fmt: skip
    cfg = compose(*sources(directories, large=0.9, small=0.1), *own)
    assert cfg.model.data.mixture["mine"].dataset.val == "x000"
    split = open_data(cfg).dataset("train").split
    assert split.source.lengths[split.mixture.records["mine"]].tolist() == [3]
    assert len(split.records) == sum(SIZES.values()) + 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.data.mixture.large.weight=0"], r"^model\.data\.mixture\.large\.weight is 0\.0, expected above 0$"),
        (["model.data.mixture.large.weight=inf"], r"^model\.data\.mixture\.large\.weight is inf, expected a finite"),
        (["model.data.mixture.large.weigth=1"], r"^unknown key .*weigth \(did you mean .*large\.weight\?\)$"),
        (["model.data.mixture.large=0.5"], r"^model\.data\.mixture\.large is 0\.5, expected a group of keys$"),
        (["model.data.mixture.new.dataset_path=x"], r"^missing value: give model\.data\.mixture\.new\.weight=\.\.\.$"),
        (["model.data.mixture.new.weight=1"], r"^model\.data\.mixture\.new\.dataset_path is null, expected str$"),
        (["data=uniref50_90"], r"^model\.data\.mixture cannot draw from clusters: choose data@model\.data=mixture$"),
        (["model.data.mixture=null"], None),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str | None, directories: dict[str, Path]) -> None:
    if message is None:  # null: one data set
        assert compose(*sources(directories, large=1), *overrides).model.data.mixture is None
        return
    with pytest.raises(UserError, match=message):
        compose(*sources(directories, large=1), *overrides)


def test_missing_sources_and_files_are_one_line(directories: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.data\.mixture has no sources: give model\.data\.mixture\.NAME\."):
        compose("data=mixture")
    cfg = compose(*sources(directories | {"gone": tmp_path}, large=1, gone=1))
    with pytest.raises(UserError, match=rf"^1 of 1 data files not found in {tmp_path}/train: x000\.csv"):
        check_files_exist(cfg.model.data)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x000.csv").write_text("record_id,record_name,sequence_length,sequence\n")
    with pytest.raises(
        UserError, match=rf"^model\.data\.mixture\.gone: {tmp_path}/train/x000\.csv contains no records"
    ):
        open_data(cfg).dataset("train")
    cfg = compose(*sources(directories, large=1), "model.data.mixture.large.data_impl_kwargs.csv_mmap.data_col=9")
    with pytest.raises(
        UserError, match=r"^model\.data\.mixture\.large: .*model\.data\.mixture\.large\.data_impl_kwargs"
    ):
        open_data(cfg).dataset("train")


def test_a_note_names_rounded_shares(directories: dict[str, Path]) -> None:
    notes = {
        large: [note for note in open_data(compose(*sources(directories, large=large, small=1))).dataset("train").notes
                if "rounded" in note]
        for large in (4, 2)
    }  # fmt: skip
    assert notes[4] == []
    expected = "model.data.mixture: the shares are rounded to multiples of 1/10,000: large 0.6667, small 0.3333"
    assert notes[2] == [expected]
