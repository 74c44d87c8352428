# SPDX-License-Identifier: Apache-2.0
"""Nested state as JSON and back: what JSON does not know is marked with a `$` key. No code is ever run on reading."""

from typing import Any

import torch

from bionemo.checkpoint.tensors import DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def encode(value: Any) -> Any:
    """Make JSON of dicts, lists, tuples, numbers, strings, None and small tensors.

    Raises:
        TypeError: at anything else.
    """
    match value:
        case torch.Tensor():
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype in _DTYPES:
                return {"$tensor": value.reshape(-1).tolist(), "dtype": dtype, "shape": list(value.shape)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"$tuple": [encode(item) for item in value]}
        case dict():
            return {"$dict": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(f"a checkpoint holds tensors, numbers, strings and containers, not {type(value).__name__}")


def decode(value: Any) -> Any:
    """Make Python values of what `encode` made.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError, RecursionError: at what it cannot have made.
    """
    match value:
        case {"$tensor": list(values), "dtype": str(name), "shape": list(shape)}:
            return torch.tensor(values, dtype=_DTYPES[name]).reshape(shape)
        case {"$tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"$dict": list(pairs)}:
            return {decode(k): decode(v) for k, v in pairs}
        case list():
            return [decode(item) for item in value]
        case dict():
            raise ValueError(f"{list(value)} is no mark of a checkpoint")
    return value
