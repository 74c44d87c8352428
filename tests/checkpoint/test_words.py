# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of the size of its vocabulary."""

from typing import Any

import pytest

from bionemo.checkpoint.tools import words
from bionemo.tokenizers import load_tokenizer


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv", "prott5nv", "megamolbart", "gpt2"])
def test_it_is_that_of_the_tokenizer(name: str) -> None:
    vocabulary = load_tokenizer(name)
    assert words({"vocabulary": vocabulary.identity}) == vocabulary.vocab_size


@pytest.mark.parametrize(
    ("model", "expected"),
    [({}, None), ({"words": 517}, 517), ({"words": None}, None), ({"vocabulary": []}, 0), ({"vocabulary": "x"}, None),
     ({"vocabulary": ["gpt2", "x", "y"]}, 3)],
)  # fmt: skip
def test_of_whatever_stands_there(model: dict[str, Any], expected: int | None) -> None:
    assert words(model) == expected
