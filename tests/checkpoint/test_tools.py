# SPDX-License-Identifier: Apache-2.0
"""Vocabulary sizes in checkpoints."""

from typing import Any

import pytest

from bionemo.checkpoint.tools import read_vocabulary_size
from bionemo.tokenizers import load_tokenizer


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv", "prott5nv", "megamolbart", "gpt2"])
def test_vocabulary_size_equals_the_tokenizers(name: str) -> None:
    vocabulary = load_tokenizer(name)
    assert read_vocabulary_size({"vocabulary": vocabulary.identity}) == vocabulary.vocab_size


@pytest.mark.parametrize(
    ("model", "expected"),
    [({}, None), ({"words": 517}, 517), ({"words": None}, None), ({"vocabulary": []}, 0), ({"vocabulary": "x"}, None),
     ({"vocabulary": ["gpt2", "x", "y"]}, 3)],
)  # fmt: skip
def test_vocabulary_size_of_other_entries(model: dict[str, Any], expected: int | None) -> None:
    assert read_vocabulary_size(model) == expected
