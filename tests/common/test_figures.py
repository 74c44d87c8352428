# SPDX-License-Identifier: Apache-2.0
"""The style of figures: text, resolution, formats, and statistics with confidence intervals."""

import io
import math
import re
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from scipy.stats import norm, spearmanr

from bionemo.common.errors import UserError
from bionemo.common.figures import PALETTE, new_figure, plot_points, render, spearman, with_interval


@pytest.fixture
def pair() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=400)
    return x, (x + generator.normal(size=400)).round(1)  # with ties


def drawn(suffix: str, points: int = 10) -> bytes:
    with new_figure(3.5, 2) as figure:
        axes = figure.subplots()
        plot_points(axes, np.arange(points), np.arange(points))
        axes.set(xlabel="x, nats", title="n = 10")
        return render(figure, suffix)


def test_formats() -> None:
    """Text in an SVG is text, and all of it has 7 or 8 points; files do not depend on the time."""
    with Image.open(io.BytesIO(drawn(".png"))) as image:
        assert image.size == (1050, 600)
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    svg = drawn(".svg").decode()
    assert ">x, nats</text>" in svg and ">n = 10</text>" in svg
    assert {float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)} == {7, 8}  # 72 px are an inch
    assert 'width="252pt"' in svg
    pdf = drawn(".pdf")
    assert pdf.startswith(b"%PDF") and b"/Type0" in pdf and b"/Type3" not in pdf  # embedded TrueType
    assert (drawn(".svg"), drawn(".pdf")) == (svg.encode(), pdf)


def test_many_points_are_an_image_in_an_svg() -> None:
    assert b"<image" not in drawn(".svg", 2000)
    many = drawn(".svg", 5000)
    assert b"<image" in many and len(many) < 100_000


def test_the_style_is_not_left_behind() -> None:
    before = dict(mpl.rcParams)
    drawn(".png")
    assert dict(mpl.rcParams) == before


def test_colors_differ_for_color_blind_readers() -> None:
    """Simulated deuteranopia and protanopia (Vienot et al. 1999): no two colors look alike."""
    to_lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    lost = [np.eye(3), np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
            np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])]  # fmt: skip
    rgb = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in PALETTE]) ** 2.2
    for matrix in lost:
        seen = np.clip(rgb @ (np.linalg.inv(to_lms) @ matrix @ to_lms).T, 0, 1) ** (1 / 2.2)
        distances = np.linalg.norm(seen[:, None] - seen, axis=-1)[np.triu_indices(len(PALETTE), 1)]
        assert distances.min() > 0.1


def test_spearman(pair: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = pair
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, rel=1e-12)
    both = spearman(np.stack([x, y]), np.stack([y, y]), axis=-1)
    np.testing.assert_allclose(both, [spearmanr(x, y).statistic, 1], rtol=1e-12)


def test_intervals(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """The interval of a mean is that of the normal distribution; a pair is resampled together."""
    x, y = pair

    def mean(values: Any, other: Any, axis: int) -> Any:
        assert values.shape == other.shape
        return values.mean(axis)

    text = with_interval("mean", mean, x, y)
    value, low, high = map(float, re.findall(r"-?[\d.]+", text.replace("\N{MINUS SIGN}", "-")))
    assert value == pytest.approx(x.mean(), rel=5e-3)
    width = norm.ppf(0.975) * x.std() / math.sqrt(len(x))
    np.testing.assert_allclose([low, high], [x.mean() - width, x.mean() + width], atol=0.15 * width)
    assert with_interval("mean", mean, x, y) == text
    low, high = map(float, re.findall(r"-?[\d.]+", with_interval("rho", spearman, x, y))[1:])
    error = (1 - spearmanr(x, y).statistic ** 2) / math.sqrt(len(x))  # Fisher's approximation for normal variables
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.3)


def test_statistics_that_are_not_defined() -> None:
    for x, y in (([1.0], [2.0]), ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])):
        with pytest.raises(UserError, match="rho is not defined: there is one point, or all values are equal"):
            with_interval("rho", spearman, np.array(x), np.array(y))
    assert (
        with_interval("rho", spearman, np.array([1.0, 2]), np.array([3.0, 4])) == "rho 1.00"
    )  # resamples of equal rows
