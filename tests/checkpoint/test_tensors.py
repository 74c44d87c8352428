# SPDX-License-Identifier: Apache-2.0
"""Bitwise round trips of tensors, written and read in any pieces."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from bionemo import checkpoint
from bionemo.checkpoint import Piece, split_into_blocks
from bionemo.checkpoint.tensors import DTYPES, checksum_file, write
from bionemo.common.errors import UserError
from tests.checkpoint.samples import names, same_bits, state, together, whole

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bits, including NaN, infinities and denormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@given(SHAPES, st.data())
def test_blocks_tile_a_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    numbered = torch.arange(size).reshape(shape)
    found = list(split_into_blocks(shape, start, stop))
    cut = [numbered[tuple(slice(a, a + n) for a, n in zip(offset, part, strict=True))] for offset, part in found]
    assert torch.cat([numbered[()].new_empty(0), *(part.reshape(-1) for part in cut)]).tolist() == [
        *range(start, stop)
    ]
    assert all(tuple(part.shape) == size and part.numel() for part, (_, size) in zip(cut, found, strict=True))
    assert len(found) <= max(1, 2 * len(shape) - 1)  # the minimal number: row ends, and whole rows between them


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_empty_range_has_no_blocks(shape: tuple[int, ...]) -> None:
    assert list(split_into_blocks(shape, 0, 0)) == []


def shards(name: str, values: Tensor, edges: list[int]) -> Iterator[Piece]:
    """Yield pieces of the flattened tensor between edges, like those of a distributed optimizer."""
    flat, shape = values.reshape(-1), tuple(values.shape)
    for start, stop in pairwise(edges):
        at = start
        for offset, size in split_into_blocks(shape, start, stop):
            yield Piece(name, shape, offset, flat[at : at + math.prod(size)].view(size))
            at += math.prod(size)


@st.composite
def halves(draw: st.DrawFn, name: str, shape: tuple[int, ...], offset: tuple[int, ...], part: Tensor) -> list[Piece]:
    """Split a tensor recursively along any dimensions, like tensor parallel layers."""
    long = [dim for dim, size in enumerate(part.shape) if size > 1]
    if not long or draw(st.booleans()):
        return [Piece(name, shape, offset, part)]
    dim = draw(st.sampled_from(long))
    at = draw(st.integers(1, part.shape[dim] - 1))
    further = tuple(begin + at * (number == dim) for number, begin in enumerate(offset))
    first, second = part.split([at, part.shape[dim] - at], dim)
    return [*draw(halves(name, shape, offset, first)), *draw(halves(name, shape, further, second))]


@st.composite
def cuts(draw: st.DrawFn, name: str, values: Tensor) -> list[Piece]:
    """Split a tensor recursively or into ranges."""
    if draw(st.booleans()):
        edges = draw(st.lists(st.integers(0, values.numel()), max_size=5))
        return list(shards(name, values, sorted({0, *edges, values.numel()})))
    return draw(halves(name, tuple(values.shape), (0,) * values.ndim, values))


@settings(max_examples=60)
@given(st.data())
def test_any_block_is_read_from_any_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Tensors written with one layout are read with another."""
    processes = data.draw(st.integers(1, 3))
    pieces: list[list[Piece]] = [[] for _ in range(processes)]
    tensors = {}
    for number, shape in enumerate(data.draw(st.lists(SHAPES, min_size=1, max_size=3))):
        name = f"weights/{number}"
        tensors[name] = filled(shape, data.draw(st.sampled_from(list(DTYPES))), seed=number)
        for piece in data.draw(cuts(name, tensors[name])):
            pieces[data.draw(st.integers(0, processes - 1))].append(piece)
    path = tmp_path_factory.mktemp("any") / "a"
    together(path, state(1), pieces)  # type: ignore[arg-type]
    checkpoint.check(path)
    saved = checkpoint.Checkpoint(path)
    assert saved.shapes() == {name: tuple(values.shape) for name, values in tensors.items()}
    for name, values in tensors.items():
        assert same_bits(saved.read(name), values)
        begin = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
        size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(begin, values.shape, strict=True))
        expected = values[tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))]
        assert same_bits(saved.read(name, begin, size), expected)


def test_all_types_and_odd_shapes_are_read_by_the_library(tmp_path: Path) -> None:
    """Also by safetensors' own file reader."""
    tensors = {
        f"{dtype}/{shape}": filled(shape, dtype) for dtype in DTYPES for shape in ((), (0, 3), (3,), (5, 7), (1, 2, 3))
    }
    tensors["not contiguous"] = torch.randn(4, 6).T
    tensors["step of two"] = torch.arange(10)[::2]
    tensors["needs a gradient"] = torch.nn.Parameter(torch.randn(3))
    digest = write(tmp_path / "a.safetensors", [whole(name, values) for name, values in tensors.items()])
    assert digest == checksum_file(tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name].detach()) for name in tensors)
    assert all(values.data_ptr() % values.element_size() == 0 for values in found.values() if values.numel())
    checkpoint.save(tmp_path / "b", state(1), [whole(name, values) for name, values in tensors.items()])
    saved = checkpoint.Checkpoint(tmp_path / "b")
    assert all(same_bits(saved.read(name), tensors[name].detach()) for name in tensors)


def test_every_nan_keeps_its_bits(tmp_path: Path) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        checkpoint.save(tmp_path / "a", state(1), [whole("w", patterns.view(dtype))])
        assert torch.equal(checkpoint.Checkpoint(tmp_path / "a").read("w").view(torch.int16), patterns)


def test_files_are_json_and_safetensors_and_hold_no_objects(tmp_path: Path) -> None:
    together(tmp_path / "a", state(1), [[whole("w", torch.randn(3, 4))], [], [whole("v", torch.randn(2))]])
    tensors = ["tensors-0.safetensors", "tensors-2.safetensors"]  # the process without data writes none
    assert names(tmp_path / "a") == {*tensors, "index.json", "state.json", "manifest.json"}
    for name in ("index.json", "state.json", "manifest.json"):
        json.loads((tmp_path / "a" / name).read_text())
    for name in tensors:
        with safe_open(tmp_path / "a" / name, framework="pt") as file:
            assert len(file.keys()) == 1
        content = (tmp_path / "a" / name).read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")  # the format: size of a JSON header, the header, values
        (entry,) = json.loads(content[8:header]).values()
        assert entry["data_offsets"] == [0, len(content) - header]


def test_a_missing_piece_is_an_error(tmp_path: Path) -> None:
    values = torch.randn(4, 4)
    checkpoint.save(tmp_path / "a", state(1), shards("w", values, [0, 5]))
    saved = checkpoint.Checkpoint(tmp_path / "a")
    assert same_bits(saved.read("w", (0, 1), (1, 3)), values[:1, 1:])
    for wanted in (None, ((2, 0), (1, 2)), ((1, 0), (1, 2))):
        with pytest.raises(UserError, match=r"a cannot be used: w cannot be read \(\d+ values of the block at"):
            saved.read("w", *wanted or ())
    with pytest.raises(UserError, match="v cannot be read"):
        saved.read("v")
    with pytest.raises(ValueError, match="w is given twice"):
        checkpoint.save(tmp_path / "b", state(1), [whole("w", values), whole("w", values)])
    assert names(tmp_path) == {"a"}
