# SPDX-License-Identifier: Apache-2.0
"""Micro-batches contain the right tokens, and a sequence does not depend on the rest of its batch."""

import pickle
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.dataset import TokenizedBatch
from bionemo.data.proteins.masking import MaskedDataset, ResidueMasker
from bionemo.data.proteins.splits import Split
from bionemo.data.sampler import SampleIds
from bionemo.tokenizers import load_tokenizer


class Texts:
    """A sequence source in memory."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = [text.encode() for text in texts]
        self.lengths = np.array([len(text) for text in self.texts], np.int32)

    def __len__(self) -> int:
        return len(self.texts)

    def gather(
        self, records: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, positions: np.ndarray
    ) -> None:
        for record, start, count, position in zip(records, starts, counts, positions, strict=True):
            out[position : position + count] = list(self.texts[record][start : start + count])

    def text(self, record: int) -> str:
        return self.texts[record].decode()

    def fields(self, record: int) -> dict[str, str]:
        return {"sequence": self.text(record)}


def packed(*records: int | list[int], epoch: int = 0) -> list[SampleIds]:
    """Return one packed sequence for each argument."""
    groups = [np.atleast_1d(np.array(group, np.int64)) for group in records]
    return [(np.full_like(group, epoch), group) for group in groups]


class Batches(NamedTuple):
    """Collates packed sequences to tensors."""

    collator: Collator

    def __call__(self, batch: list[SampleIds]) -> PackedBatch:
        return self.several([batch])[0]

    def several(self, batches: list[list[SampleIds]]) -> list[PackedBatch]:
        return [batch.unpack() for batch in self.collator(batches)]


def collator(
    texts: list[str],
    name: str = "esm2nv",
    *,
    modify: float = 0.15,
    seq_length: int = 32,
    micro_batch_size: int = 4,
    crop: bool = False,
    dynamic_padding: bool = False,
) -> "Batches":
    alphabet = load_tokenizer(name)
    split = Split(Texts(texts), np.arange(len(texts)), np.zeros(256, np.int64), (), seed=5, crop=crop)
    dataset = MaskedDataset(split, alphabet, seq_length, ResidueMasker(alphabet, modify, 0.8, 0.1))
    return Batches(Collator(dataset, micro_batch_size, alphabet.pad_id, dynamic_padding))


def unmasked(batch: PackedBatch) -> list[np.ndarray]:
    """Return the ids of each sequence with masks replaced by the targets."""
    tokens = batch.tokens.clone()
    tokens[batch.target_positions] = batch.target_ids.int()
    return [piece.numpy() for piece in tokens[: batch.num_tokens].split(batch.lengths)]


def texts_of(batch: PackedBatch, name: str = "esm2nv") -> list[str]:
    """Return the letters of each sequence, between BOS and EOS."""
    alphabet = load_tokenizer(name)
    pieces = unmasked(batch)
    assert all((piece[0], piece[-1]) == (alphabet.bos_id, alphabet.eos_id) for piece in pieces)
    return [alphabet.decode(piece[1:-1]) for piece in pieces]


def check(batch: PackedBatch, total: int, pad_id: int) -> None:
    """Check the invariants of all batches."""
    number, filled = len(batch.lengths), sum(batch.lengths)
    assert filled == batch.num_tokens <= total
    assert {len(batch.tokens), len(batch.position_ids), len(batch.segment_ids)} == {total}
    for tensor in (batch.tokens, batch.position_ids, batch.segment_ids, batch.cu_seqlens):
        assert tensor.dtype == torch.int32
    assert batch.target_positions.dtype == batch.target_ids.dtype == torch.int64
    assert len(batch.target_positions) == len(batch.target_ids)
    sizes = batch.cu_seqlens.diff().tolist()
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == total
    assert sizes[:number] == list(batch.lengths)
    assert all(0 < size <= batch.max_length for size in sizes)
    expected = [(k, p) for k, length in enumerate(batch.lengths) for p in range(length)]
    expected += [(number, 0)] * (total - filled)
    assert list(zip(batch.segment_ids.tolist(), batch.position_ids.tolist(), strict=True)) == expected
    assert (batch.tokens[filled:] == pad_id).all()
    assert ((batch.target_positions >= 0) & (batch.target_positions < filled)).all()


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(PackedBatch)]
    return all(torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_packed_letters_are_those_of_the_source(name: str) -> None:
    texts = ["MKTAYIAKQR", "A", "", "GGGGG", "XBUZO", "W" * 30]
    batch = collator(texts, name, modify=0.5)(packed([3, 0, 1], [5], [2, 4]))
    check(batch, total=4 * 32, pad_id=load_tokenizer(name).pad_id)
    assert texts_of(batch, name) == [texts[i] for i in (3, 0, 1, 5, 2, 4)]
    assert batch.lengths == (7, 12, 3, 32, 2, 7)
    assert batch.max_length == 32
    assert batch.unknown_tokens == 0
    assert (batch.tokens[batch.target_positions] == load_tokenizer(name).mask_id).any()


def test_fixed_and_dynamic_padding() -> None:
    texts = ["ACDEF", "ACDEFGHIKLM", "ACDEFGHIKLMNPQRSTVWYAC"]
    fixed = collator(texts)(packed(0, 1))
    check(fixed, total=4 * 32, pad_id=1)
    for records, total in [((0,), 64), ((2, 1, 2), 64), ((2, 1, 2, 0), 128), ((), 64)]:
        batch = collator(texts, dynamic_padding=True)(packed(*records))
        check(batch, total=total, pad_id=1)
        assert texts_of(batch) == [texts[i] for i in records]
    full = collator(["A" * 90], dynamic_padding=True, seq_length=30)(packed(0, 0, 0, 0))
    check(full, total=128, pad_id=1)


def test_a_batch_may_contain_only_padding() -> None:
    for batch in (collator(["ACD"])([]), collator(["ACD"]).several([[], packed(0), []])[2]):
        check(batch, total=4 * 32, pad_id=1)
        assert batch.lengths == ()
        assert batch.cu_seqlens.tolist() == [0, 32, 64, 96, 128]
        assert len(batch.target_positions) == batch.unknown_tokens == 0
        assert batch.dropout_keys.tolist() == [0]
    assert collator(["ACD"]).several([]) == []


def test_truncation_keeps_the_beginning() -> None:
    text = "ACDEFGHIKLMNPQRSTVWY" * 3
    batch = collator([text, text[:30]])(packed(0, 1))
    assert texts_of(batch) == [text[:30], text[:30]]


def test_crops_are_uniform_and_depend_on_record_and_epoch() -> None:
    text = "".join(np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), 36))
    crops = collator([text] * 600 + ["ACD"], crop=True, micro_batch_size=600)
    batch = crops(packed(*range(600)))
    check(batch, total=600 * 32, pad_id=1)
    starts = [text.index(piece) for piece in texts_of(batch)]
    counts = np.bincount(starts, minlength=7)
    assert len(counts) == 7  # 0 to 6, including the last window
    assert (((counts - 600 / 7) ** 2) / (600 / 7)).sum() < 30
    for record in (0, 17, 599):
        assert texts_of(crops(packed([600, record]))) == ["ACD", texts_of(batch)[record]]
    again = [text.index(piece) for piece in texts_of(crops(packed(*range(600), epoch=1)))]
    assert 0.05 < np.mean(np.array(again) == starts) < 0.25


LETTERS = st.text(alphabet="ACJ*a1", max_size=20)  # sources leave out white space


@given(st.lists(LETTERS, min_size=1, max_size=6), st.sampled_from(["esm1nv", "esm2nv"]))
def test_ids_are_those_of_the_alphabet(texts: list[str], name: str) -> None:
    """A run of unknown letters is one token."""
    alphabet = load_tokenizer(name)
    batch = collator(texts, name, micro_batch_size=8)(packed(list(range(len(texts)))))
    check(batch, total=8 * 32, pad_id=alphabet.pad_id)
    assert [piece[1:-1].tolist() for piece in unmasked(batch)] == [alphabet.encode(text).tolist() for text in texts]
    assert batch.unknown_tokens == sum(letter in "J*1" for text in texts for letter in text)


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([0.02, 0.15, 1.0]),
)
def test_a_sequence_does_not_depend_on_the_rest_of_its_batch(
    groups: list[list[int]], dynamic: bool, modify: float
) -> None:
    draws = np.random.default_rng(4)
    texts = ["".join(draws.choice(list("ACDEFGHIKLMNPQRSTVWYJ"), n)) for n in (1, 60, 7, 0, 33, 30, 31, 2, 90, 12)]
    build = collator(texts, crop=True, modify=modify, dynamic_padding=dynamic)
    built = build.several([packed(*group, epoch=2) for group in groups])
    for group, batch in zip(groups, built, strict=True):
        assert equal(batch, build(packed(*group, epoch=2)))
        check(batch, total=len(batch.tokens), pad_id=1)
        ends = np.cumsum(batch.lengths)
        for record, end, length in zip(group, ends, batch.lengths, strict=True):
            alone = build(packed(record, epoch=2))
            assert alone.lengths == (length,)
            assert torch.equal(alone.tokens[:length], batch.tokens[end - length : end])
            here = (batch.target_positions >= end - length) & (batch.target_positions < end)
            assert torch.equal(alone.target_positions, batch.target_positions[here] - (end - length))
            assert torch.equal(alone.target_ids, batch.target_ids[here])


def test_dropout_keys_depend_on_sequence_and_epoch() -> None:
    build = collator(["ACDEF"] * 50)
    keys = {(epoch, i): int(build(packed(i, epoch=epoch)).dropout_keys[0]) for epoch in (0, 1) for i in range(50)}
    assert len(set(keys.values())) == 100
    together = build(packed(3, 1, 2, epoch=1)).dropout_keys.tolist()
    assert together == [keys[1, 3], keys[1, 1], keys[1, 2], 0]


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_a_batch_is_the_same_after_pickling(name: str) -> None:
    batches = collator(["ACDEJJF", "GG"], name)
    (compact,) = batches.collator([packed(0, 1)])
    assert isinstance(compact, TokenizedBatch)
    assert equal(pickle.loads(pickle.dumps(compact)).unpack(), batches(packed(0, 1)))
