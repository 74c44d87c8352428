# SPDX-License-Identifier: Apache-2.0
"""Bytes that are really alive: an instrument that knows nothing of the formulas."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts the storages that operations make while it is on, until they are freed, however they are held.

    Attributes:
        now: bytes that are alive.
        peak: the most that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tensors(args):  # what was there before, parameters above all
            self._known.add(given.untyped_storage())
        result = function(*args, **(kwargs or {}))
        for made in tensors(result):
            if (storage := made.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)


def tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Those in tuples and lists of arguments or results."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from tensors(each)
