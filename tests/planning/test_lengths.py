# SPDX-License-Identifier: Apache-2.0
"""Lengths that a plan assumes."""

import numpy as np
import pytest

from bionemo.data.mock import MockSource
from bionemo.planning.lengths import cut_moment, tokens_of

from .alone import config


@pytest.mark.parametrize("limit", [100, 510, 1022, 10**6])
@pytest.mark.parametrize("power", [1, 2])
def test_moments_of_lengths_that_are_cut(power: int, limit: int) -> None:
    sigma = np.sqrt(2 * np.log(278 / 210))
    drawn = np.minimum(np.random.default_rng(0).lognormal(np.log(210), sigma, 10**6), limit)
    assert cut_moment(power, limit) == pytest.approx((drawn**power).mean(), rel=0.01)


def test_mean_and_median_are_what_they_are_said_to_be() -> None:
    assert cut_moment(1, 10**9) == pytest.approx(278)


def test_mock_lengths_are_those_of_the_mock_data() -> None:
    cfg = config("esm2nv", seq_length=256)
    cfg.model.data.packing = False
    drawn = np.minimum(MockSource(100_000, 64, 512, 0, "train").lengths.astype(float) + 2, 256)
    tokens = tokens_of(cfg.model)
    assert tokens.filled == pytest.approx(drawn.mean() / 256, rel=0.01)
    assert tokens.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert tokens.sequences == pytest.approx(1)
    assert tokens.attended == pytest.approx((drawn**2).mean() / drawn.mean(), rel=0.01)
    assert tokens.asked_in_row == pytest.approx(0.15 * drawn.mean(), rel=0.01)


def test_packed_rows_are_full_and_long_sequences_weigh_more() -> None:
    cfg = config("esm2nv", seq_length=1024)
    cfg.model.data.data_impl = "csv_fields_mmap"
    tokens = tokens_of(cfg.model)
    assert (tokens.row, tokens.filled) == (1024, 1.0)
    assert 278 < tokens.attended < 1024
    assert "UniRef50" in tokens.source
