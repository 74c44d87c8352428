# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: its state at once, its tensors block by block, however they were divided when written."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bionemo.checkpoint.json_state import decode
from bionemo.checkpoint.manifest import INDEX, STATE, manifest_of
from bionemo.checkpoint.state_schema import check_state
from bionemo.common.errors import UserError


class Checkpoint:
    """A checkpoint that has been verified (manifest.check); nothing of it is read before it is asked for.

    What was verified is that it is as it was written, not by whom: files are read under the names that the manifest
    may have, and all that they cannot hold raises a UserError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Step, metrics, checksums."""
        return manifest_of(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """Everything but the tensors of the model and the optimizer."""
        with self._reading(STATE):
            state: dict[str, Any] = decode(json.loads((self.path / STATE).read_text()))
            check_state(state)
        return state

    @property
    def config(self) -> Mapping[str, Any]:
        """See TensorSource."""
        config = self.state.get("config")
        return config if isinstance(config, Mapping) else {}

    @cached_property
    def _index(self) -> dict[str, Any]:
        with self._reading(INDEX):
            index: dict[str, Any] = json.loads((self.path / INDEX).read_text())
        return index

    def shapes(self, group: str = "") -> dict[str, tuple[int, ...]]:
        """Shape of every whole tensor; with a group such as "weights", of its tensors under their names in it."""
        prefix = group and f"{group}/"
        with self._reading(INDEX):
            return {
                name.removeprefix(prefix): tuple(entry["shape"])
                for name, entry in self._index.items()
                if name.startswith(prefix)
            }

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor, or the block of it that begins at `offset` and has `shape`."""
        with self._reading(name):
            entry = self._index[name]
            shape = tuple(entry["shape"]) if shape is None else shape
            return self._read(entry["pieces"], (0,) * len(shape) if offset is None else offset, shape)

    def _read(self, pieces: list[Any], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        values: Tensor | None = None
        found = 0
        for file, key, begins, sizes in pieces:
            low = [max(a, b) for a, b in zip(offset, begins, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, begins, sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begins, strict=True))
            block = self._file(file).get_slice(key)[there] if there else self._file(file).get_tensor(key)
            if [*block.shape] != [b - a for a, b in zip(low, high, strict=True)]:
                raise ValueError(f"{key} in {file} has another shape than {INDEX} says")
            if block.shape == shape:
                return block  # most often a layout like the one that wrote: no second copy
            values = torch.empty(shape, dtype=block.dtype) if values is None else values
            values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = block
            found += block.numel()
        if values is None and 0 in shape:
            file, key, *_ = pieces[0]
            return torch.empty(shape, dtype=self._file(file).get_tensor(key).dtype)
        if values is None or found != math.prod(shape):
            raise ValueError(f"{math.prod(shape) - found:,} values of the block at {offset} are in no file")
        return values

    def _file(self, name: str) -> Any:
        if name not in self.manifest["xxh3_128"]:
            raise ValueError(f"{name} is no file of a checkpoint")
        if name not in self._files:
            self._files[name] = safe_open(self.path / name, framework="pt")
        return self._files[name]

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # there is no end to what someone may have written there
            problem = f"{what} cannot be read ({' '.join(str(error).split()) or type(error).__name__})"
            raise UserError(f"checkpoint {self.path} cannot be used: {problem}; take another or remove it") from error
