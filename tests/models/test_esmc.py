# SPDX-License-Identifier: Apache-2.0
"""ESMC: training does not depend on the layout; chains are separated by a token that masking never inserts."""

from pathlib import Path

import pytest
import torch

from bionemo.tokenizers.alphabet import esm2nv, esmc
from tests.support.parallel_layouts import Layout, Run, on_every_process


def losses_and_norms(layout: Layout) -> list[tuple[float, float]]:
    return Run(layout, "esmc").train(3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                Layout(pipeline=2), Layout(data=2, sharded=True), Layout(tensor=4), Layout(tensor=2, sequence=True),
                Layout(tensor=2, pipeline=2, sequence=True),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_training_does_not_depend_on_the_layout(tmp_path: Path, layout: Layout) -> None:
    """The tensor ranks hold heads of the normalized queries and keys, and rows of gate and up."""
    one, many = (
        torch.tensor(on_every_process(each, losses_and_norms, directory=tmp_path)) for each in (Layout(), layout)
    )
    assert one.shape == (3, 2)
    assert (one > 0.1).all()
    torch.testing.assert_close(many, one, rtol=2e-6, atol=0)


def test_vocabulary() -> None:
    """64 tokens, of which the first 33 are those of ESM-2 except id 31."""
    ours, esm2 = esmc(), esm2nv()
    assert ours.vocab_size == ours.padded_vocab_size(64) == 64
    assert [i for i in range(33) if ours.tokens[i] != esm2.tokens[i]] == [31]
    assert (ours.bos_id, ours.pad_id, ours.eos_id, ours.unk_id, ours.mask_id) == (0, 1, 2, 3, 32)
    assert ours.encode("MK|lA").tolist() == [20, 15, 31, 4, 5]
    assert esm2.encode("MK|lA").tolist() == [20, 15, 3, 4, 5]
    assert ours.residue_ids.tolist() == esm2.residue_ids.tolist() == list(range(4, 31))
