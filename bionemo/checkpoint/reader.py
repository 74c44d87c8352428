# SPDX-License-Identifier: Apache-2.0
"""Read blocks of tensors from checkpoints that were saved with any parallel layout."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bionemo.checkpoint.json_state import decode
from bionemo.checkpoint.manifest import INDEX, STATE, load_manifest
from bionemo.common.errors import UserError


class Checkpoint:
    """A TensorSource of a checkpoint that `check` has verified; files are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Step, metrics and checksums; empty if it is invalid."""
        return load_manifest(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """Everything except the tensors of the model and the optimizer."""
        with self._reading(STATE):
            state: dict[str, Any] = decode(json.loads((self.path / STATE).read_text()))
        return state

    @property
    def config(self) -> Mapping[str, Any]:
        """See TensorSource."""
        return self.state.get("config", {})

    @cached_property
    def _index(self) -> dict[str, Any]:
        with self._reading(INDEX):
            index: dict[str, Any] = json.loads((self.path / INDEX).read_text())
        return index

    def shapes(self, group: str = "") -> dict[str, tuple[int, ...]]:
        """See TensorSource."""
        prefix = group and f"{group}/"
        return {
            name.removeprefix(prefix): tuple(entry["shape"])
            for name, entry in self._index.items()
            if name.startswith(prefix)
        }

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """See TensorSource."""
        with self._reading(name):
            entry = self._index[name]
            shape = tuple(entry["shape"]) if shape is None else shape
            return self._assemble(entry["pieces"], (0,) * len(shape) if offset is None else offset, shape)

    def _assemble(self, pieces: list[Any], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        values: Tensor | None = None
        found = 0
        for file, key, starts, sizes in pieces:
            low = [max(a, b) for a, b in zip(offset, starts, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, starts, sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            overlap = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, starts, strict=True))
            block = self._file(file).get_slice(key)[overlap] if overlap else self._file(file).get_tensor(key)
            if block.shape == shape:
                return block  # the usual case of an unchanged layout, without a copy
            values = torch.empty(shape, dtype=block.dtype) if values is None else values
            values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = block
            found += block.numel()
        if values is None and 0 in shape:
            file, key, *_ = pieces[0]
            return torch.empty(shape, dtype=self._file(file).get_tensor(key).dtype)
        if values is None or found != math.prod(shape):
            raise ValueError(f"{math.prod(shape) - found:,} values of the block at {offset} are missing")
        return values

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.path / name, framework="pt")
        return self._files[name]

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            problem = f"{what} cannot be read ({' '.join(str(error).split()) or type(error).__name__})"
            raise UserError(
                f"checkpoint {self.path} cannot be used: {problem}; choose another or remove it"
            ) from error
