# SPDX-License-Identifier: Apache-2.0
"""Indexed datasets are read as Megatron reads them; invalid files cause a one-line error."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.data.text.indexed import IndexedTokens
from tests.support.indexed import write_indexed

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), max_size=8)
FIRST = [[[1, 2, 3, 0]], [[]], [[4, 0]], [[5, 6], [7, 0]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_all_id_types(tmp_path: Path, dtype: type) -> None:
    found = IndexedTokens(write_indexed(tmp_path / "text", FIRST, dtype))
    assert found.tokens.dtype == dtype
    assert found.tokens.tolist() == [1, 2, 3, 0, 4, 0, 5, 6, 7, 0]
    assert [found.document_start(number) for number in range(5)] == [0, 4, 4, 6, 10]
    assert (len(found), found.documents) == (10, 4)


@settings(max_examples=40)
@given(DOCUMENTS)
def test_tokens_and_documents_agree_with_megatron(place: Path, documents: list[list[list[int]]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = write_indexed(place / "megatron", documents)
    found = IndexedTokens(prefix)
    ends = [found.document_start(number) for number in range(len(documents) + 1)]
    if len(found):  # Megatron cannot map an empty file
        reference = IndexedDataset(str(prefix))
        bounds = reference.document_indices
        assert found.documents == len(bounds) - 1
        for number in range(found.documents):
            tokens = [reference[sequence] for sequence in range(bounds[number], bounds[number + 1])]
            expected = np.concatenate([np.zeros(0, np.uint16), *tokens])
            assert found.tokens[ends[number] : ends[number + 1]].tolist() == expected.tolist()
    flat = [[number for sequence in sequences for number in sequence] for sequences in documents]
    assert found.tokens.tolist() == [number for document in flat for number in document]
    assert np.diff(ends).tolist() == list(map(len, flat))


def test_pickle_contains_only_the_prefix(tmp_path: Path) -> None:
    found = IndexedTokens(write_indexed(tmp_path / "text", [[list(range(1000))]] * 100))
    data = pickle.dumps(found)
    assert len(data) < 500
    assert pickle.loads(data).tokens.tolist() == found.tokens.tolist()


def test_fingerprint_depends_on_the_content(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    same = [IndexedTokens(write_indexed(prefix, FIRST)).fingerprint for prefix in (one, two)]
    assert same[0] == same[1]
    assert IndexedTokens(write_indexed(three, [*FIRST[:3], [[5, 6], [8, 0]]])).fingerprint != same[0]
    assert IndexedTokens(write_indexed(three, [[[1, 2, 3]], [[0]], *FIRST[2:]])).fingerprint != same[0]


def idx(
    magic: bytes = b"MMIDIDX\0\0", version: int = 1, code: int = 8, lengths: tuple[int, ...] = (2, 3),
    pointers: tuple[int, ...] = (0, 4), bounds: tuple[int, ...] = (0, 1, 2), counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    counts = counts or (len(lengths), len(bounds))
    head = magic + struct.pack("<QBQQ", version, code, *counts)
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(bounds, "<i8"))
    return head + b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize(
    ("index", "data", "message"),
    [
        (b"", 10, "is too short"),
        (idx()[:33], 10, "is too short"),
        (idx()[:-1], 10, "bytes, which is wrong for 2 sequences"),
        (idx() + b"\0\0", 10, "bytes, which is wrong for 2 sequences"),  # like the modes of a multimodal dataset
        (idx(magic=b"TNTIDX\0\0\0"), 10, "does not begin with MMIDIDX"),
        (idx(version=2), 10, "has version 2, not 1"),
        (idx(code=7), 20, "floating-point numbers, not ids"),
        (idx(code=9), 10, "unknown type 9"),
        (idx(counts=(2**63, 2**64 - 1)), 10, "bytes, which is wrong for"),
        (idx(lengths=(-2, 7)), 10, "a gap or an overlap"),
        (idx(pointers=(0, 2)), 10, "a gap or an overlap"),
        (idx(pointers=(4, 0)), 10, "a gap or an overlap"),
        (idx(lengths=(2**31 - 1, 2**31 - 1), pointers=(0, 2**32 - 2)), 10, "has 10 bytes, but .* 8,589,934,588"),
        (idx(bounds=(0, 2, 1, 2)), 10, "do not cover all sequences in order"),
        (idx(bounds=(0, -1, 2)), 10, "do not cover all sequences in order"),
        (idx(bounds=(0, 1)), 10, "do not cover all sequences"),
        (idx(bounds=(1, 2)), 10, "do not cover all sequences"),
        (idx(bounds=()), 10, "do not cover all sequences"),
        (idx(), 8, "text.bin has 8 bytes, but .*text.idx describes 10"),
        (idx(), 11, "text.bin has 11 bytes"),
        (idx(), 0, "text.bin has 0 bytes"),
    ],
)  # fmt: skip
def test_invalid_files(tmp_path: Path, index: bytes, data: int, message: str) -> None:
    (tmp_path / "text.idx").write_bytes(idx())
    (tmp_path / "text.bin").write_bytes(bytes(10))
    assert len(IndexedTokens(tmp_path / "text")) == 5
    (tmp_path / "text.idx").write_bytes(index)
    (tmp_path / "text.bin").write_bytes(bytes(data))
    with pytest.raises(UserError, match=message) as caught:
        IndexedTokens(tmp_path / "text")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "text.") in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text\.idx cannot be read .*: give the path of the data without"):
        IndexedTokens(tmp_path / "text")
    write_indexed(tmp_path / "text", FIRST)
    with pytest.raises(UserError, match=r"text\.idx\.idx cannot be read"):
        IndexedTokens(tmp_path / "text.idx")
    (tmp_path / "text.bin").unlink()
    with pytest.raises(UserError, match=r"text\.bin cannot be read"):
        IndexedTokens(tmp_path / "text")


@settings(max_examples=200)
@given(st.booleans(), st.integers(0, 200), st.binary(max_size=12), st.booleans())
def test_corrupted_bytes(place: Path, which: bool, at: int, junk: bytes, cut: bool) -> None:
    """Corrupted files either remain consistent, with every document readable, or cause a UserError."""
    prefix = write_indexed(place / "hostile", FIRST)
    path = Path(f"{prefix}.{'idx' if which else 'bin'}")
    data = path.read_bytes()
    path.write_bytes(data[:at] + junk + (b"" if cut else data[at + len(junk) :]))
    try:
        found = IndexedTokens(prefix)
    except UserError as error:
        assert "\n" not in str(error)
        return
    begins = [found.document_start(number) for number in range(found.documents + 1)]
    assert begins[0] == 0 and begins[-1] == len(found)
    assert begins == sorted(begins)
    pickle.loads(pickle.dumps(found))
