# SPDX-License-Identifier: Apache-2.0
"""Hashes of names, compared with dictionaries."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_intdigest

from bionemo.preparation import name_index
from bionemo.preparation.name_index import Hashes, NameIndex, find_duplicates, hash_names

TOP = 2**64 - 1
# few enough to occur often, at the edges of partitions and of the range; halves are shared by different names
WORDS = st.sampled_from([0, 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, TOP // 3, TOP // 3 + 1, TOP - 1, TOP])
FORGED = st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 2**63, TOP])), max_size=40)


def forged(pairs: Sequence[tuple[int, int]]) -> Hashes:
    return np.array(pairs, np.uint64).reshape(-1, 2)


def files(folder: Path, hashes: Hashes, cuts: Sequence[int]) -> list[Path]:
    """Write hashes to consecutive files; some may be empty."""
    paths = []
    for number, part in enumerate(np.split(hashes, sorted(cuts))):
        paths.append(folder / f"{number}.names")
        part.tofile(paths[-1])
    return paths


def expected_repeats(keys: Sequence[object]) -> tuple[list[int], list[int]]:
    first: dict[object, int] = {}
    again, before = [], []
    for number, key in enumerate(keys):
        if first.setdefault(key, number) != number:
            again.append(number)
            before.append(first[key])
    return again, before


@settings(max_examples=80)
@given(FORGED, st.data())
def test_chosen_hashes_against_dictionaries(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("hashes")
    cuts = data.draw(st.lists(st.integers(0, len(pairs)), max_size=4))
    others = data.draw(FORGED)
    paths = files(folder, forged(pairs), cuts)
    with patch.object(name_index, "_PARTITION_SIZE", data.draw(st.integers(1, 50))):
        again, before = find_duplicates(paths, len(pairs))
        built = NameIndex.build(folder / "index.npy", paths, len(pairs))
    assert (again.tolist(), before.tolist()) == expected_repeats(pairs)
    numbers = {pair: number for number, pair in reversed([*enumerate(pairs)])}
    for index in (built, NameIndex(folder / "index.npy")):
        for queries in (pairs, others, others + pairs[::-1]):
            assert index.lookup(forged(queries)).tolist() == [numbers.get(pair, -1) for pair in queries]


@pytest.mark.parametrize("partition_size", [1, 7, 100, 8 << 20])
def test_names_against_dictionaries(tmp_path: Path, partition_size: int) -> None:
    rng = np.random.default_rng(1)
    names = [f"UniRef90_{n:05}" for n in rng.integers(0, 700, 1000)]
    keys = hash_names(pa.array([name.encode() for name in names], pa.binary()))
    with patch.object(name_index, "_PARTITION_SIZE", partition_size * 10 if partition_size < 100 else partition_size):
        paths = files(tmp_path, keys, [0, 10, 10, 600])
        again, before = find_duplicates(paths, len(names))
        index = NameIndex.build(tmp_path / "index.npy", paths, len(names))
    assert (again.tolist(), before.tolist()) == expected_repeats(names)
    queries = [f"UniRef90_{n:05}" for n in range(800)]
    numbers = {name: number for number, name in reversed([*enumerate(names)])}
    found = index.lookup(hash_names(pa.array([name.encode() for name in queries], pa.binary())))
    assert found.tolist() == [numbers.get(name, -1) for name in queries]


def test_hashes_equal_xxh3_128() -> None:
    names = [b"", b"a", b"UniRef50_A0A" * 20, "é中".encode()]
    whole = [
        (int(low) << 64 | int(high)).to_bytes(16, "little") for high, low in hash_names(pa.array(names, pa.binary()))
    ]
    assert whole == [xxh3_128_intdigest(name).to_bytes(16, "big") for name in names]
    sliced = pa.array([b"x", *names, b"y"], pa.binary()).slice(1, len(names))
    assert hash_names(sliced).tolist() == hash_names(pa.array(names, pa.binary())).tolist()


def test_an_empty_index(tmp_path: Path) -> None:
    for number, paths in enumerate(([], files(tmp_path, forged([]), []))):
        again, before = find_duplicates(paths, 0)
        assert len(again) == len(before) == 0
        index = NameIndex.build(tmp_path / f"index{number}.npy", paths, 0)
        assert index.lookup(forged([(0, 0), (TOP, TOP)])).tolist() == [-1, -1]
        assert index.lookup(forged([])).tolist() == []
