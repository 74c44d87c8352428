# SPDX-License-Identifier: Apache-2.0
"""Measure the memory that a computation uses, independently of the formulas."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of storages allocated by operations, until they are freed.

    Attributes:
        now: bytes in use.
        peak: maximum of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages(args):  # existing tensors, such as parameters
            self._known.add(storage)
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)


def _storages(nested: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]
