# SPDX-License-Identifier: Apache-2.0
"""Round trips of state through JSON, and invalid JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo.checkpoint.json_state import decode, encode
from tests.checkpoint.samples import same_bits

STATE: dict[str, Any] = {
    "global_step": 7,
    "nested": {"list": [1, [2.5, None], (True, False, ("a", {3: "int key", "3": "text key", (1, 2): "pair"}))]},
    "empty": {"dict": {}, "list": [], "tuple": (), "text": ""},
    "numbers": [float("inf"), -float("inf"), float("nan"), 0.1 + 0.2, -0.0, 2**70, 1e-310],
    "text": 'α 𝛽 \ud800 " \\ \n $tensor',
    "imitations": [{"$tensor": [0], "dtype": "int8", "shape": [1]}, {"$tuple": [1]}, {"$dict": []}],
    "tensors": {
        "bf16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(4).half(),
        "float": torch.randn(2, 3),
        "double": torch.randn(5, dtype=torch.float64),
        "long": torch.tensor([-(2**63), 2**63 - 1]),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).T,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    },
}


def same(found: Any, expected: Any) -> bool:
    """Return whether types and bits are equal at all levels."""
    if type(found) is not type(expected):
        return False
    match expected:
        case torch.Tensor():
            return same_bits(found, expected)
        case dict():
            return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
        case list() | tuple():
            return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected)  # distinguishes -0.0 from 0.0, and treats nan as equal to nan


def test_round_trip() -> None:
    assert same(decode(json.loads(json.dumps(encode(STATE)))), STATE)
    assert not same([1], [1.0])
    assert not same({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])})


@pytest.mark.parametrize(
    "value",
    [Path("x"), {1}, b"bytes", object(), 1j, torch.zeros(2, dtype=torch.complex64), [{"a": (Path("x"),)}], len],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint can contain tensors, numbers, strings and containers, not "):
        encode({"x": value})
