# SPDX-License-Identifier: Apache-2.0
"""Text dataset, compared with a reference that holds all tokens in one list."""

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.files import parse_prefixes
from bionemo.data.sampler import SampleStream
from bionemo.data.text.blend import Blend
from bionemo.data.text.corpora import split_documents
from bionemo.data.text.dataset import DocumentOptions, TextDataset
from tests.support.indexed import write_indexed

EOD = 0


class Listed:
    """A token stream backed by a list."""

    def __init__(self, tokens: Sequence[int], dtype: type = np.uint16) -> None:
        self.name, self.size, self.fingerprint = "listed", len(tokens), {"tokens": list(tokens)}
        self._tokens = np.array(tokens, dtype)

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        return self._tokens[(starts[:, None] + np.arange(count)) % self.size]


def opened(tokens: Sequence[int], seq_length: int, **arguments: Any) -> TextDataset:
    given = {"vocab_size": 1000, "eod_id": EOD, "seed": 5, **arguments}
    return TextDataset([Listed(tokens)], seq_length=seq_length, **given)


def open_documents(
    data_prefix: Any, splits_string: str, split: Any, *, seq_length: int = 8, vocab_size: int = 1000
) -> TextDataset:
    """Open a split of indexed datasets like a run."""
    data = SimpleNamespace(
        data_impl="mmap", data_prefix=data_prefix, splits_string=splits_string, reset_attention_mask=False,
        reset_position_ids=False, eod_mask_loss=False, **{split: SimpleNamespace(seed=1)},
    )  # fmt: skip
    config: Any = SimpleNamespace(data=data, seq_length=seq_length)
    vocabulary: Any = SimpleNamespace(vocab_size=vocab_size, eod_id=EOD)
    return TextDataset.open(config, vocabulary, split)


def text(documents: int, seed: int = 0) -> list[list[int]]:
    """Generate documents of 1 to 12 distinct tokens and an EOD token."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 13, documents)
    tokens = iter(range(1, 10**6))
    return [[*(next(tokens) for _ in range(length)), EOD] for length in lengths]


def flat(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def epoch(samples: TextDataset, number: int) -> Any:
    return samples.tokenize(np.full(len(samples.records), number), samples.records)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 3))
def test_targets_are_the_next_tokens_of_the_stream(seq_length: int, more: int, number: int) -> None:
    tokens = list(range(1, seq_length + 2 + more))
    samples = opened(tokens, seq_length)
    batch = epoch(samples, number)
    count = (len(tokens) - 1) // seq_length
    assert batch.inputs.lengths.tolist() == [seq_length] * count == samples.lengths.tolist()
    assert batch.target_positions.tolist() == list(range(count * seq_length))
    inputs, labels = batch.inputs.ids.tolist(), batch.target_ids.tolist()
    shift = inputs[0] - 1
    assert 0 <= shift < seq_length
    circle = tokens * 2
    assert inputs == circle[shift : shift + len(inputs)]
    assert labels == circle[shift + 1 : shift + 1 + len(inputs)]
    assert number or inputs == tokens[: len(inputs)]
    assert len(set(labels)) == len(labels)  # no token is a target twice in one pass


def test_sample_boundaries_change_with_the_epoch_except_in_validation() -> None:
    samples = opened(list(range(1, 900)), 64)
    shifts = [int(epoch(samples, number).inputs.ids[0]) - 1 for number in range(40)]
    assert shifts[0] == 0
    assert len(set(shifts)) > 20
    assert shifts != [int(epoch(opened(range(1, 900), 64, seed=6), n).inputs.ids[0]) - 1 for n in range(40)]
    still = opened(list(range(1, 900)), 64, shift=False)
    assert {int(epoch(still, number).inputs.ids[0]) for number in range(5)} == {1}


def test_samples_depend_on_epoch_and_record_only() -> None:
    samples = opened(flat(text(200)), 16, vocab_size=5000, options=DocumentOptions(True, False, True))
    epochs, records = np.array([3, 0, 1, 3, 0]), np.array([2, 9, 2, 0, 2])
    together = samples.tokenize(epochs, records)
    assert together.sequences_per_sample is not None and together.inputs.first_positions is not None
    first = done = targets = 0
    for number in range(5):
        alone = samples.tokenize(epochs[number : number + 1], records[number : number + 1])
        pieces, tokens = int(together.sequences_per_sample[number]), int(alone.inputs.lengths.sum())
        for whole, part in (
            (together.inputs.lengths[first : first + pieces], alone.inputs.lengths),
            (together.inputs.dropout_keys[first : first + pieces], alone.inputs.dropout_keys),
            (together.inputs.first_positions[first : first + pieces], alone.inputs.first_positions),
            (together.inputs.ids[done : done + tokens], alone.inputs.ids),
            (
                together.target_positions[targets : targets + len(alone.target_positions)] - done,
                alone.target_positions,
            ),
            (together.target_ids[targets : targets + len(alone.target_positions)], alone.target_ids),
        ):
            assert whole.tolist() == part.tolist()
        first, done, targets = first + pieces, done + tokens, targets + len(alone.target_positions)
    assert len(set(together.inputs.dropout_keys.tolist())) == len(together.inputs.dropout_keys)
    again = pickle.loads(pickle.dumps(samples))
    assert again.tokenize(epochs, records).inputs.dropout_keys.tolist() == together.inputs.dropout_keys.tolist()
    assert again.records.tolist() == samples.records.tolist()
    nothing = samples.tokenize(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert not any(
        map(len, (nothing.inputs.ids, nothing.inputs.lengths, nothing.inputs.dropout_keys, nothing.target_ids))
    )
    assert len(pickle.dumps(opened([1] * 10**5, 1))) < 3 * len(pickle.dumps([1] * 10**5))


def megatron_masks(row: list[int], options: DocumentOptions) -> tuple[list[list[bool]], list[float], list[int]]:
    """Return Megatron's attention mask, loss mask and position ids."""
    import torch
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    import bionemo.megatron  # noqa: F401  # prepares the host

    mask, loss_mask, positions = _get_ltor_masks_and_position_ids(
        torch.tensor(row),
        EOD,
        options.reset_position_ids,
        options.reset_attention_mask,
        options.eod_mask_loss,
        True,
    )
    return (~mask[0]).tolist(), loss_mask.tolist(), positions.tolist()


@pytest.mark.parametrize(
    "options",
    [
        DocumentOptions(),
        DocumentOptions(eod_mask_loss=True),
        DocumentOptions(True),
        DocumentOptions(True, True),
        DocumentOptions(True, True, True),
    ],
)
def test_options_agree_with_megatron(options: DocumentOptions) -> None:
    documents = text(60)
    documents[7:7] = [[EOD], [EOD]]  # empty documents
    samples = opened(flat(documents), 24, options=options)
    for number in (0, 1, 2):
        batch = epoch(samples, number)
        counts = (
            [1] * len(samples.records) if batch.sequences_per_sample is None else batch.sequences_per_sample.tolist()
        )
        assert len(batch.inputs.lengths) == len(batch.inputs.dropout_keys) == len(batch.unknown_counts) == sum(counts)
        assert len(set(batch.inputs.dropout_keys.tolist())) == len(batch.inputs.dropout_keys)
        lengths = iter(batch.inputs.lengths.tolist())
        offsets = iter(
            [0] * sum(counts) if batch.inputs.first_positions is None else batch.inputs.first_positions.tolist()
        )
        is_target = np.isin(np.arange(len(batch.inputs.ids)), batch.target_positions)
        for sample, count in enumerate(counts):
            row = batch.inputs.ids[sample * 24 : sample * 24 + 24].tolist()
            attention_mask, loss_mask, positions = megatron_masks(row, options)
            at, ours = 0, []
            seen = np.zeros((24, 24), bool)
            for _ in range(count):
                length, offset = next(lengths), next(offsets)
                seen[at : at + length, at : at + length] = np.tri(length, dtype=bool)
                ours += range(offset, offset + length)
                at += length
            assert seen.tolist() == attention_mask
            assert ours == positions
            assert is_target[sample * 24 : sample * 24 + 24].tolist() == [bool(value) for value in loss_mask]


def test_reset_position_ids_requires_reset_attention_mask() -> None:
    with pytest.raises(UserError, match=r"reset_position_ids=True requires .*reset_attention_mask=True"):
        DocumentOptions(reset_position_ids=True)


def test_dropout_keys_of_whole_samples() -> None:
    samples = opened(flat(text(50)), 16)
    batch = epoch(samples, 2)
    expected = sample_keys(purpose_key(5, "dropout"), np.full_like(samples.records, 2), samples.records)
    assert batch.inputs.dropout_keys.tolist() == expected.tolist()
    assert batch.sequences_per_sample is None and batch.inputs.first_positions is None and batch.source is None
    assert not batch.unknown_counts.any()


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(0, 99_999), st.floats(0, 1)), min_size=1, max_size=3).filter(any),
    st.integers(0, 10**9),
)
def test_splits_agree_with_megatron(shares: list[float], documents: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    import bionemo.megatron  # noqa: F401  # prepares the host

    string = ",".join(f"{share:.6f}" for share in shares)
    if not any(map(float, string.split(","))):
        return
    ours = list(split_documents(string, documents).values())
    for found, ends in zip(ours, convert_split_vector_to_split_matrix(parse_and_normalize_split(string)), strict=True):
        if ends is None:
            assert found[0] == found[1]
        else:
            assert found == tuple(round(end * float(documents)) for end in ends)


def test_splits() -> None:
    assert split_documents("980,10,10", 1000) == {"train": (0, 980), "val": (980, 990), "test": (990, 1000)}
    assert split_documents("99990,8,2", 10**6)["val"] == (999_900, 999_980)
    assert split_documents("1/1", 3) == {"train": (0, 2), "val": (2, 3), "test": (3, 3)}
    for string in ("", "a,b", "0,0,0", "1,2,3,4", "1,-1", "nan", "inf,1"):
        with pytest.raises(UserError, match="splits_string"):
            split_documents(string, 10)


def test_splits_of_a_file_are_ranges_of_documents(tmp_path: Path) -> None:
    documents = text(50)
    documents[11:11] = documents[30:30] = [[], []]
    prefix = str(write_indexed(tmp_path / "text", [[document] for document in documents]))
    found = {}
    for split, (first, last) in split_documents("60,30,10", 54).items():
        samples = open_documents(prefix, "60,30,10", split)
        tokens = flat(documents[first:last])
        count = (len(tokens) - 1) // 8
        assert epoch(samples, 0).inputs.ids.tolist() == tokens[: count * 8]
        assert epoch(samples, 0).target_ids.tolist() == tokens[1 : count * 8 + 1]
        moved = epoch(samples, 3).inputs.ids.tolist()
        shift = tokens.index(moved[1]) - 1
        assert moved == (tokens * 2)[shift : shift + count * 8]
        assert (shift > 0) == (split == "train")
        assert not samples.notes
        found[split] = samples.fingerprint
        again = pickle.loads(pickle.dumps(samples))
        assert again.tokenize(np.array([3]), np.array([0])).inputs.ids.tolist() == moved[:8]
    assert found["train"] != found["val"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_ids_have_the_smallest_type(dtype: type) -> None:
    tokens = list(range(1, 100))
    for vocab_size, narrow in ((50_257, np.uint16), (70_000, np.int32)):
        streams = [Listed(tokens, dtype)]
        samples = TextDataset(streams, seq_length=10, vocab_size=vocab_size, eod_id=EOD, seed=1)
        batch = epoch(samples, 0)
        assert batch.inputs.ids.dtype == batch.target_ids.dtype == narrow
        assert batch.inputs.ids.tolist() == tokens[:90]


def test_a_blend_without_weights_contains_every_sample_once() -> None:
    streams = [Listed(range(begin, begin + size)) for begin, size in ((1, 101), (200, 33), (300, 12))]
    samples = TextDataset(streams, seq_length=10, vocab_size=1000, eod_id=EOD, seed=1)
    batch = epoch(samples, 0).inputs.ids.reshape(-1, 10)
    expected = [*range(1, 101, 10), *range(200, 230, 10), 300]
    assert sorted(batch[:, 0].tolist()) == expected
    assert np.all(np.diff(batch.astype(int)) == 1)


def largest_remainders(size: int, weights: Sequence[float]) -> list[float]:
    return [size * weight / sum(weights) for weight in weights]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.05, 1)), min_size=2, max_size=5),
    st.integers(0, 3),
)
def test_blend_by_weights(corpora: list[tuple[int, float]], seed: int) -> None:
    sizes, weights = zip(*corpora, strict=True)
    blend = Blend(sizes, weights)
    exact = largest_remainders(len(blend), weights)
    if min(exact) < 1:
        return
    assert sum(blend.records_per_corpus) == len(blend) == sum(sizes)
    assert all(abs(quota - share) < 1 for quota, share in zip(blend.records_per_corpus, exact, strict=True))
    records = np.arange(len(blend))
    drawn: list[Counter[tuple[int, int]]] = [Counter() for _ in sizes]
    for number in range(4):
        corpora_of, passes, numbers = blend.locate(np.full_like(records, number), records)
        assert np.bincount(corpora_of, minlength=len(sizes)).tolist() == list(blend.records_per_corpus)
        for corpus, passed, sample in zip(corpora_of.tolist(), passes.tolist(), numbers.tolist(), strict=True):
            drawn[corpus][passed, sample] += 1
    for size, quota, seen in zip(sizes, blend.records_per_corpus, drawn, strict=True):
        assert set(seen.values()) == {1}  # no sample is repeated within a pass
        passes_done, rest = divmod(4 * quota, size)
        assert Counter(passed for passed, _ in seen) == Counter(
            {number: size for number in range(passes_done)} | ({passes_done: rest} if rest else {})
        )


def test_any_range_of_a_blend_has_the_configured_proportions() -> None:
    blend = Blend((5000, 300, 4700), (0.5, 0.3, 0.2))
    corpora, _, numbers = blend.locate(np.zeros(10_000, np.int64), np.arange(10_000))
    for begin in range(0, 10_000, 500):
        shares = np.bincount(corpora[begin : begin + 500], minlength=3) / 500
        assert np.abs(shares - (0.5, 0.3, 0.2)).max() < 0.02
    assert np.ptp(numbers[corpora == 2]) > 4600  # 2,000 samples, from all of the corpus


def test_a_small_corpus_has_different_sample_boundaries_in_every_pass() -> None:
    streams = [Listed(range(1, 41)), Listed(range(100, 1000))]
    samples = TextDataset(streams, seq_length=10, vocab_size=1000, eod_id=EOD, seed=1, weights=(0.5, 0.5))
    batch = epoch(samples, 0).inputs.ids.reshape(-1, 10)
    small = batch[batch[:, 0] < 100]
    assert len(small) == 46  # of 92 samples, although the corpus has only 3
    assert len(set(small[:, 0].tolist())) > 20


def test_the_shuffled_order_visits_every_sample() -> None:
    samples = opened(list(range(1, 500)), 16)
    epochs, records = SampleStream(samples.records, seed=3).read(0, 2 * len(samples.records))
    batch = samples.tokenize(epochs, records).inputs.ids.reshape(-1, 16)
    first = batch[: len(samples.records)]
    assert sorted(first[:, 0].tolist()) == list(range(1, 16 * len(first), 16))
    assert first[:, 0].tolist() != sorted(first[:, 0].tolist())


def test_prefixes() -> None:
    assert parse_prefixes("a") == (("a",), None)
    assert parse_prefixes(["a", "b/c"]) == (("a", "b/c"), None)
    assert parse_prefixes([0.3, "a", 0.7, "b"]) == (("a", "b"), (0.3, 0.7))
    assert parse_prefixes(["1", "a", "3e0", "b"]) == (("a", "b"), (1.0, 3.0))
    for wrong in ([], [0.3, "a", "b"], ["a", 0.3], [0.3, 0.7, "a", "b"], [0, "a"], [-1, "a"], [float("nan"), "a"],
                  [0.5, "a", "b", 0.5], [1], [float("inf"), "a"]):  # fmt: skip
        with pytest.raises(UserError, match=r"data_prefix=.*\[0.3,a,0.7,b\]"):
            parse_prefixes(wrong)


def test_errors_when_opening(tmp_path: Path) -> None:
    documents = text(50)
    prefix = str(write_indexed(tmp_path / "text", [[document] for document in documents]))
    wrong: list[tuple[Any, str, str, dict[str, Any], str]] = [
        (prefix, "1,1,1", "train", {"vocab_size": 100}, "text has the id .* outside the vocabulary of 100 tokens"),
        (prefix, "100,0,0", "val", {}, "splits_string=100,0,0 leaves val none of the 50 documents"),
        (prefix, "90,5,5", "test", {"seq_length": 99}, r"too few for a sample of 99 \+ 1: lower model.seq_length"),
        (prefix, "1", "train", {"seq_length": 10_000}, "too few for a sample"),
        ([prefix, str(tmp_path / "none")], "1", "train", {}, r"none\.idx cannot be read"),
        ([1, prefix, 1e-9, prefix], "1", "train", {}, "weight 1e-09 of .* is less than one of"),
        ([1], "1", "train", {}, "data_prefix"),
    ]
    for data_prefix, string, split, more, message in wrong:
        with pytest.raises(UserError, match=message) as caught:
            open_documents(data_prefix, string, split, **more)
        assert "\n" not in str(caught.value)
    assert open_documents(prefix, "1", "train", seq_length=len(flat(documents)) - 1).records.tolist() == [0]


def test_an_id_outside_the_vocabulary_is_an_error_when_read() -> None:
    for dtype, foreign in ((np.uint16, 60_000), (np.int32, -1)):
        tokens = [*range(1, 50), foreign, *range(50, 99)]
        samples = TextDataset([Listed(tokens, dtype)], seq_length=10, vocab_size=1000, eod_id=EOD, seed=1)
        samples.tokenize(np.array([0]), np.array([1]))
        with pytest.raises(UserError, match=f"listed has the id {foreign}, outside"):
            samples.tokenize(np.array([0, 0]), np.array([1, 4]))
