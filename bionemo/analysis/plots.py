# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG files."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bionemo.analysis.variant_files import Scores
from bionemo.common.figures import new_figure, plain, to_png
from bionemo.data.table import is_missing
from bionemo.inference.outputs import Floats
from bionemo.inference.variants import AMINO_ACIDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RESIDUES_PER_ROW = 100
_MAX_CATEGORIES = 10  # with a color of their own


def plot_scan(path: Path, scores: Floats, sequence: str, offset: int = 0) -> None:
    """Plot the scores [n, 20] of `variants.scan` as a heatmap, a hundred residues per row; dots mark the wild type."""
    count = -(-len(scores) // _RESIDUES_PER_ROW)
    figure = new_figure(14, 0.6 + 2.9 * count)
    rows: np.ndarray = figure.subplots(count, squeeze=False)[:, 0]
    limit = max(float(np.percentile(np.abs(scores), 99)), 1e-6)
    for number, axes in enumerate(rows):
        first = number * _RESIDUES_PER_ROW
        part, letters = scores[first : first + _RESIDUES_PER_ROW], sequence[first : first + _RESIDUES_PER_ROW]
        extent = (first + offset + 0.5, first + offset + len(part) + 0.5, 19.5, -0.5)
        image = axes.imshow(part.T, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", extent=extent)
        wild_type = [(first + offset + 1 + index, AMINO_ACIDS.find(letter)) for index, letter in enumerate(letters)]
        x, y = np.array([each for each in wild_type if each[1] >= 0]).reshape(-1, 2).T
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set_yticks(range(20), list(AMINO_ACIDS), fontsize=7)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(first + offset + 0.5, first + offset + min(_RESIDUES_PER_ROW, len(scores)) + 0.5)
    rows[-1].set_xlabel("residue")
    figure.colorbar(image, ax=rows.tolist(), label="log p(mutant) - log p(wild type)", aspect=12 * count, pad=0.01)
    path.write_bytes(to_png(figure))


def plot_scores(path: Path, scores: Floats, measured: Scores, rho: float, name: str) -> None:
    """Plot scores [N] against measured scores [N]."""
    figure = new_figure(5, 4.5)
    axes = _open_axes(figure)
    axes.plot(measured, scores, ".", color="tab:blue", markersize=4, alpha=0.5)
    axes.set(xlabel=f"{plain(name)}, measured", ylabel="zero-shot score, nats", title=f"Spearman's rho {rho:.3f}")
    path.write_bytes(to_png(figure))


def plot_contacts(path: Path, predicted: Floats, name: str, known: Floats | None = None) -> None:
    """Plot contact probabilities [n, n]; known contacts [n, n] replace them below the diagonal."""
    figure = new_figure(5.6, 5)
    axes = figure.subplots()
    shown = predicted if known is None else np.triu(predicted) + np.tril(np.nan_to_num(known), -1)
    ends = (0.5, len(predicted) + 0.5)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, extent=(*ends, *ends[::-1]), interpolation="nearest")
    axes.set(xlabel="residue", ylabel="residue")
    axes.set_title(plain(name), fontsize=9, wrap=True)
    figure.colorbar(image, label="probability of a contact")
    path.write_bytes(to_png(figure))


def plot_map(path: Path, points_N2: Floats, colors: Sequence[str] | None = None, name: str = "") -> None:
    """Plot sequences as points [N, 2], colored by a number or by the most frequent categories."""
    figure = new_figure(7, 5.5)
    axes = _open_axes(figure)
    size, (x, y) = float(np.clip(2000 / len(points_N2), 1, 20)), points_N2.T
    if colors is None:
        axes.scatter(x, y, s=size, color="tab:blue", linewidths=0)
    elif (numbers := _numbers(colors := ["" if is_missing(color) else color for color in colors])) is not None:
        image = axes.scatter(x, y, s=size, c=numbers, cmap="viridis", linewidths=0, plotnonfinite=False)
        figure.colorbar(image, label=plain(name))
    else:
        _plot_categories(axes, points_N2, np.array(colors), name, size)
    axes.set(xticks=[], yticks=[])
    path.write_bytes(to_png(figure))


def _plot_categories(axes: "Axes", points_N2: Floats, colors: np.ndarray, name: str, size: float) -> None:
    categories = [category for category, _ in Counter(colors[colors != ""].tolist()).most_common(_MAX_CATEGORIES)]
    others = ~np.isin(colors, categories)
    if others.any():
        x, y = points_N2[others].T
        axes.scatter(x, y, s=size, color="lightgray", linewidths=0, label="others")
    for number, category in enumerate(categories):
        x, y = points_N2[colors == category].T
        axes.scatter(x, y, s=size, color=f"C{number}", linewidths=0, label=plain(category))
    axes.legend(title=plain(name), frameon=False, fontsize=7, markerscale=20 / size**0.5 / 4.5, loc="center left",
                bbox_to_anchor=(1, 0.5))  # fmt: skip


def _numbers(colors: Sequence[str]) -> np.ndarray | None:
    """Return the colors as numbers, nan for empty cells; None if a cell is not a number or all are empty."""
    try:
        numbers = np.array([float(color or "nan") for color in colors])
    except ValueError:
        return None
    return None if np.isnan(numbers).all() else numbers


def _open_axes(figure: "Figure") -> "Axes":
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes
