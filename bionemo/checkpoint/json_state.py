# SPDX-License-Identifier: Apache-2.0
"""Nested Python state as JSON: types that JSON does not have are marked with a `$` key. Decoding runs no code."""

from typing import Any

import torch

from bionemo.checkpoint.tensors import DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def encode(value: Any) -> Any:
    """Convert dicts, lists, tuples, numbers, strings, None and small tensors to JSON values.

    Raises:
        TypeError: for other types.
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
            return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"a checkpoint can contain tensors, numbers, strings and containers, not {type(value).__name__}")


def decode(value: Any) -> Any:
    """Convert JSON values that `encode` returned to the original values.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError, RecursionError: for values that `encode` does not write.
    """
    match value:
        case {"$tensor": list(values), "dtype": str(name), "shape": list(shape)}:
            return torch.tensor(values, dtype=_DTYPES[name]).reshape(shape)
        case {"$tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"$dict": list(pairs)}:
            return {decode(key): decode(item) for key, item in pairs}
        case list():
            return [decode(item) for item in value]
        case dict():
            raise ValueError(f"{list(value)} are not the keys of an encoded value")
    return value
