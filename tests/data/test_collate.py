# SPDX-License-Identifier: Apache-2.0
"""Micro-batches hold the letters they should, where they should, whatever they are built with."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator, assemble, disassemble
from bionemo.data.proteins.masking import MaskedSamples, Masking
from bionemo.data.proteins.residues import Residues
from bionemo.data.proteins.splits import Split, long_records
from bionemo.data.sampler import Row
from bionemo.tokenizers import load_tokenizer


class Texts:
    """A source that copies letter by letter what it was given."""

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


def rows(*records: int | list[int], epoch: int = 0) -> list[Row]:
    """One row for each argument."""
    held = [np.atleast_1d(np.array(row, np.int64)) for row in records]
    return [(np.full_like(row, epoch), row) for row in held]


def collator(
    texts: list[str],
    name: str = "esm2nv",
    *,
    modify: float = 0.15,
    seq_length: int = 32,
    rows: int = 4,
    crop: bool = False,
    compact: bool = False,
) -> Collator:
    alphabet = load_tokenizer(name)
    split = Split(Texts(texts), np.arange(len(texts)), np.zeros(256, np.int64), ())
    residues = Residues(split, alphabet, 5, seq_length, crop, ends=True)
    return Collator(MaskedSamples(residues, Masking(alphabet, modify, 0.8, 0.1)), rows, alphabet.pad_id, compact)


def unmasked(batch: PackedBatch) -> list[np.ndarray]:
    """Ids of each sequence with the answers put back."""
    tokens = batch.tokens.clone()
    tokens[batch.target_index] = batch.target_ids.int()
    return [piece.numpy() for piece in tokens[: batch.num_tokens].split(batch.lengths)]


def texts_of(batch: PackedBatch, name: str = "esm2nv") -> list[str]:
    """Letters of each sequence, whose begin and end must be there."""
    alphabet = load_tokenizer(name)
    pieces = unmasked(batch)
    assert all((piece[0], piece[-1]) == (alphabet.bos_id, alphabet.eos_id) for piece in pieces)
    return [alphabet.decode(piece[1:-1]) for piece in pieces]


def check(batch: PackedBatch, total: int, pad_id: int) -> None:
    """What holds for every batch."""
    number, filled = len(batch.lengths), sum(batch.lengths)
    assert filled == batch.num_tokens <= total
    assert {len(batch.tokens), len(batch.positions), len(batch.segment_ids)} == {total}
    for tensor in (batch.tokens, batch.positions, batch.segment_ids, batch.boundaries):
        assert tensor.dtype == torch.int32
    assert batch.target_index.dtype == batch.target_ids.dtype == torch.int64
    assert len(batch.target_index) == len(batch.target_ids)
    sizes = batch.boundaries.diff().tolist()
    assert batch.boundaries[0] == 0
    assert batch.boundaries[-1] == total
    assert sizes[:number] == list(batch.lengths)
    assert all(0 < size <= batch.longest for size in sizes)
    expected = [(k, p) for k, length in enumerate(batch.lengths) for p in range(length)]
    expected += [(number, 0)] * (total - filled)
    assert list(zip(batch.segment_ids.tolist(), batch.positions.tolist(), strict=True)) == expected
    assert (batch.tokens[filled:] == pad_id).all()
    assert ((batch.target_index >= 0) & (batch.target_index < filled)).all()


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(PackedBatch)]
    return all(torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_packed_letters_are_those_of_the_source(name: str) -> None:
    texts = ["MKTAYIAKQR", "A", "", "GGGGG", "XBUZO", "W" * 30]
    batch = collator(texts, name, modify=0.5)(rows([3, 0, 1], [5], [2, 4]))
    check(batch, total=4 * 32, pad_id=load_tokenizer(name).pad_id)
    assert texts_of(batch, name) == [texts[i] for i in (3, 0, 1, 5, 2, 4)]
    assert batch.lengths == (7, 12, 3, 32, 2, 7)
    assert batch.longest == 32
    assert batch.unknown == 0
    assert (batch.tokens[batch.target_index] == load_tokenizer(name).mask_id).any()


def test_padding_is_one_sequence_a_row_and_may_be_left_out() -> None:
    texts = ["ACDEF", "ACDEFGHIKLM", "ACDEFGHIKLMNPQRSTVWYAC"]
    fixed = collator(texts)(rows(0, 1))
    check(fixed, total=4 * 32, pad_id=1)
    for records, total in [((0,), 64), ((2, 1, 2), 64), ((2, 1, 2, 0), 128), ((), 64)]:
        batch = collator(texts, compact=True)(rows(*records))
        check(batch, total=total, pad_id=1)
        assert texts_of(batch) == [texts[i] for i in records]
    full = collator(["A" * 90], compact=True, seq_length=30)(rows(0, 0, 0, 0))
    check(full, total=128, pad_id=1)


def test_no_rows_make_a_batch_of_filler() -> None:
    for batch in (collator(["ACD"])([]), collator(["ACD"]).build([[], rows(0), []])[2]):
        check(batch, total=4 * 32, pad_id=1)
        assert batch.lengths == ()
        assert batch.boundaries.tolist() == [0, 32, 64, 96, 128]
        assert len(batch.target_index) == batch.unknown == 0
        assert batch.segment_keys.tolist() == [0]
    assert collator(["ACD"]).build([]) == []


def test_truncation_keeps_the_beginning() -> None:
    text = "ACDEFGHIKLMNPQRSTVWY" * 3
    batch = collator([text, text[:30]])(rows(0, 1))
    assert texts_of(batch) == [text[:30], text[:30]]


def test_crops_are_every_window_and_belong_to_record_and_epoch() -> None:
    text = "".join(np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), 36))
    crops = collator([text] * 600 + ["ACD"], crop=True, rows=600)
    batch = crops(rows(*range(600)))
    check(batch, total=600 * 32, pad_id=1)
    starts = [text.index(piece) for piece in texts_of(batch)]
    counts = np.bincount(starts, minlength=7)
    assert len(counts) == 7  # 0 to 6: the last window is one of them
    assert (((counts - 600 / 7) ** 2) / (600 / 7)).sum() < 30
    for record in (0, 17, 599):
        assert texts_of(crops(rows([600, record]))) == ["ACD", texts_of(batch)[record]]
    again = [text.index(piece) for piece in texts_of(crops(rows(*range(600), epoch=1)))]
    assert 0.05 < np.mean(np.array(again) == starts) < 0.25


LETTERS = st.text(alphabet="ACJ*a 1\t", max_size=20)


@settings(deadline=None)
@given(st.lists(LETTERS, min_size=1, max_size=6), st.sampled_from(["esm1nv", "esm2nv"]))
def test_ids_are_those_of_the_alphabet(texts: list[str], name: str) -> None:
    """Runs of unknown letters are one token; ESM-2's white space is none."""
    alphabet = load_tokenizer(name)
    batch = collator(texts, name, rows=8)(rows(list(range(len(texts)))))
    check(batch, total=8 * 32, pad_id=alphabet.pad_id)
    assert [piece[1:-1].tolist() for piece in unmasked(batch)] == [alphabet.encode(text).tolist() for text in texts]
    outside = "J*a1" if alphabet.skips_space else "J*a1 \t"
    assert batch.unknown == sum(letter in outside for text in texts for letter in text)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([0.02, 0.15, 1.0]),
)
def test_a_sequence_is_the_same_alone_and_in_any_company(
    groups: list[list[int]], dynamic: bool, modify: float
) -> None:
    draws = np.random.default_rng(4)
    texts = ["".join(draws.choice(list("ACDEFGHIKLMNPQRSTVWYJ"), n)) for n in (1, 60, 7, 0, 33, 30, 31, 2, 90, 12)]
    build = collator(texts, crop=True, modify=modify, compact=dynamic)
    built = build.build([rows(*group, epoch=2) for group in groups])
    for group, batch in zip(groups, built, strict=True):
        assert equal(batch, build(rows(*group, epoch=2)))
        check(batch, total=len(batch.tokens), pad_id=1)
        ends = np.cumsum(batch.lengths)
        for record, end, length in zip(group, ends, batch.lengths, strict=True):
            alone = build(rows(record, epoch=2))
            assert alone.lengths == (length,)
            assert torch.equal(alone.tokens[:length], batch.tokens[end - length : end])
            here = (batch.target_index >= end - length) & (batch.target_index < end)
            assert torch.equal(alone.target_index, batch.target_index[here] - (end - length))
            assert torch.equal(alone.target_ids, batch.target_ids[here])


def test_dropout_keys_belong_to_sequence_and_epoch() -> None:
    build = collator(["ACDEF"] * 50)
    keys = {(epoch, i): int(build(rows(i, epoch=epoch)).segment_keys[0]) for epoch in (0, 1) for i in range(50)}
    assert len(set(keys.values())) == 100
    together = build(rows(3, 1, 2, epoch=1)).segment_keys.tolist()
    assert together == [keys[1, 3], keys[1, 1], keys[1, 2], 0]


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_a_batch_is_the_same_after_a_journey(name: str) -> None:
    batch = collator(["ACDEJJF", "GG"], name)(rows(0, 1))
    parts = pickle.loads(pickle.dumps(disassemble(batch)))
    assert equal(assemble(parts), batch)


LENGTHS = np.array([5, 31, 30, 400, 2], np.int32)


@pytest.mark.parametrize(
    ("policy", "left", "word"),
    [("crop", [0, 1, 2, 3, 4], "random"), ("truncate", [0, 1, 2, 3, 4], "end"), ("drop", [0, 2, 4], "left out")],
)
def test_policies_for_long_sequences_say_what_they_do(policy: str, left: list[int], word: str) -> None:
    records, notice = long_records(LENGTHS, 30, policy, "train data")
    assert records.tolist() == left
    assert notice.startswith("train data: 2 of 5 sequences (40.0%)")
    assert word in notice
    assert long_records(LENGTHS, 400, policy, "train data")[1] == ""


def test_long_sequences_that_are_an_error_are_named_and_counted() -> None:
    words = r"train data: 2 of 5 sequences .* 30 residues .*record 1 with 31\).* crop, truncate or drop"
    with pytest.raises(UserError, match=words):
        long_records(LENGTHS, 30, "error", "train data")
    records, notice = long_records(LENGTHS, 400, "error", "train data")
    assert (records.tolist(), notice) == ([0, 1, 2, 3, 4], "")
    with pytest.raises(UserError, match="no sequence of at most 1 residues is left"):
        long_records(LENGTHS, 1, "drop", "train data")
