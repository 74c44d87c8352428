# SPDX-License-Identifier: Apache-2.0
"""How long a sequence may be: rotary positions go on, learned ones end."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from tests.inference.samples import sequences


def test_a_rotary_model_reads_longer_sequences_when_told_to(reference: tuple[Path, EsmForMaskedLM]) -> None:
    path, theirs = reference
    (text,) = sequences((150,))
    with pytest.raises(UserError, match="150 tokens, the model reads 94 at most"):
        bionemo.load(path).embed([text])
    ours = bionemo.load(path, longest=152)
    ids = torch.tensor([[0, *ours.ids([text])[0].tolist(), 2]])
    with torch.no_grad():
        hidden = theirs.esm(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0, 1:-1]
    assert np.allclose(ours.embed([text])[0], hidden.mean(0).numpy(), atol=1e-5)
    assert np.array_equal(ours.embed(["MKTAY"]), bionemo.load(path, longest=10).embed(["MKTAY"]))


def test_learned_positions_end(writer: Path) -> None:
    assert bionemo.load(writer, longest=8).embed(["CCO"]).shape[0] == 1
    with pytest.raises(UserError, match=r"has learned \d+ positions, too few for 100,000 tokens"):
        bionemo.load(writer, longest=100_000)
