# SPDX-License-Identifier: Apache-2.0
"""Plots of the analyses, in the format of the extension: .png, .svg or .pdf.

All functions raise a UserError if the plot cannot be drawn, and an OSError if it cannot be written.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bionemo.analysis.variant_files import Scores
from bionemo.common.errors import UserError
from bionemo.common.figures import PALETTE, color_bar, new_figure, plain, plot_points, render, spearman, with_interval
from bionemo.common.files import write_atomic
from bionemo.data.table import is_missing
from bionemo.inference.outputs import Floats
from bionemo.inference.variants import AMINO_ACIDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHERS, _NO_VALUE = "gray", "lightgray"  # colors of rare categories, and of points without a value
_RESIDUES_PER_ROW, _ROWS = 100, 4  # of the heat map of a scan; longer proteins have more residues per row


def plot_scan(path: Path, scores: Floats, sequence: str, offset: int = 0) -> None:
    """Plot the scores [n, 20] of `variants.scan` as a heat map; dots mark the wild type.

    The colors end at the 99th percentile of the absolute scores.
    """
    width = max(_RESIDUES_PER_ROW, -(-len(scores) // _ROWS))
    count = -(-len(scores) // width)
    shown = min(width, len(scores))
    limit = max(float(np.percentile(np.abs(scores), 99)), 1e-6)
    extend = ("neither", "min", "max", "both")[(scores.min() < -limit) + 2 * (scores.max() > limit)]
    with new_figure(3.5 if 5 * shown <= 2 * width else 7, 0.4 + 2.3 * count) as figure:
        rows: np.ndarray = figure.subplots(count, squeeze=False)[:, 0]
        for first, axes in zip(range(0, len(scores), width), rows, strict=True):
            part, begin = scores[first : first + width], first + offset + 0.5
            image = axes.imshow(
                part.T, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest",
                extent=(begin, begin + len(part), 19.5, -0.5),
            )  # fmt: skip
            y = np.array([AMINO_ACIDS.find(letter) for letter in sequence[first : first + width]])
            x = begin + 0.5 + np.flatnonzero(y >= 0)
            axes.scatter(x, y[y >= 0], s=300 / width, color="black", linewidths=0)
            axes.set_yticks(range(20), list(AMINO_ACIDS))
            axes.set_xlim(begin, begin + shown)
            axes.locator_params(axis="x", integer=True)
            ticks = [tick for tick in axes.get_xticks() if begin + width / 20 < tick < begin + len(part)]
            axes.set_xticks([begin + 0.5, *ticks])
            axes.spines.bottom.set_bounds(begin, begin + len(part))
        rows[-1].set_xlabel("residue (dots: wild type)")
        figure.supylabel("mutant residue")
        label = "log p(mutant) \N{MINUS SIGN} log p(wild type), nats"
        figure.colorbar(
            image, ax=rows.tolist(), label=label, extend=extend, extendfrac=0.05 / count, aspect=15 * count, pad=0.01
        )
        write_atomic(path, render(figure, path.suffix))


def plot_scores(path: Path, scores: Floats, measured: Scores, name: str) -> None:
    """Plot scores [N] against measured scores [N], nan if unknown, of the column `name`."""
    known = ~np.isnan(measured)
    scores, measured = scores[known], measured[known]
    with new_figure(3.5, 3.1) as figure:
        axes = figure.subplots()
        plot_points(axes, measured, scores, alpha=0.5)
        rho = with_interval("Spearman's ρ", spearman, measured, scores)
        axes.set(xlabel=plain(f"{name}, measured"), ylabel="zero-shot score, nats",
                 title=f"n = {len(scores):,}\n{rho}{' (95 % interval)' if '[' in rho else ''}")  # fmt: skip
        write_atomic(path, render(figure, path.suffix))


def plot_contacts(path: Path, predicted: Floats, name: str, known: Floats | None = None) -> None:
    """Plot contact probabilities [n, n]; known contacts [n, n] replace them below the diagonal."""
    shown = predicted if known is None else np.triu(predicted) + np.tril(np.nan_to_num(known), -1)
    ends = (0.5, len(predicted) + 0.5)
    note = "" if known is None else "\nabove the diagonal: predicted, below: known"
    with new_figure(3.5, 3.0) as figure:
        axes = figure.subplots()
        image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, extent=(*ends, *ends[::-1]), interpolation="nearest")
        axes.set(xlabel="residue", ylabel="residue")
        axes.set_title(f"{plain(name)}, {len(predicted):,} residues{note}", wrap=True)
        axes.spines[:].set_visible(True)
        color_bar(axes, image, "probability of a contact")
        write_atomic(path, render(figure, path.suffix))


def plot_map(
    path: Path, points_N2: Floats, labels: Sequence[str], colors: Sequence[str] | None = None, name: str = ""
) -> None:
    """Plot sequences as points [N, 2], colored by a number or by the most frequent categories.

    Points without a value are gray. `labels` are those of the two axes, `name` that of the colors.
    """
    if not np.ptp(points_N2, axis=0).any():
        raise UserError("there is one point, or all points are equal")
    with new_figure(3.5, 3.3) as figure:
        axes = figure.subplots()
        axes.set_aspect("equal", adjustable="datalim")  # distances are those of the embeddings
        x, y = points_N2.T
        if colors is None:
            plot_points(axes, x, y)
        elif numbers := numbers_of(colors):
            _plot_numbers(axes, points_N2, np.array(numbers), name)
        else:
            _plot_categories(axes, points_N2, np.array(["" if is_missing(each) else each for each in colors]), name)
        axes.set(xlabel=labels[0], ylabel=labels[1], title=f"n = {len(points_N2):,}")
        write_atomic(path, render(figure, path.suffix))


def _plot_numbers(axes: "Axes", points_N2: Floats, numbers: np.ndarray, name: str) -> None:
    """Plot points colored by a number, above those without a finite number."""
    from matplotlib import colormaps

    order = np.argsort(np.isfinite(numbers), kind="stable")
    colors = colormaps["viridis"].with_extremes(bad=_NO_VALUE)
    image = plot_points(axes, *points_N2[order].T, c=numbers[order], cmap=colors, plotnonfinite=True)
    color_bar(axes, image, plain(name))
    if missing := int((~np.isfinite(numbers)).sum()):
        axes.scatter([], [], s=12, color=_NO_VALUE, label=f"no value ({missing:,})")
        axes.figure.legend(loc="outside lower left")


def _plot_categories(axes: "Axes", points_N2: Floats, colors: np.ndarray, name: str) -> None:
    """Plot the most frequent categories, each in a color of its own, in a random order, so that none hides others.

    The color "" is that of points without a value.
    """
    categories = [category for category, _ in Counter(colors[colors != ""].tolist()).most_common(len(PALETTE) - 1)]
    shades = dict(zip(categories, PALETTE, strict=False))
    fills, missing = {**shades, "": _NO_VALUE}, int((colors == "").sum())
    order = np.random.default_rng(0).permutation(len(colors))
    x, y = points_N2[order].T
    plot_points(axes, x, y, c=[fills.get(color, _OTHERS) for color in colors[order].tolist()])
    for category, shade in shades.items():
        axes.scatter([], [], s=12, color=shade, label=f"{plain(category)} ({(colors == category).sum():,})")
    if others := int((~np.isin(colors, categories)).sum()) - missing:
        axes.scatter([], [], s=12, color=_OTHERS, label=f"others ({others:,})")
    if missing:
        axes.scatter([], [], s=12, color=_NO_VALUE, label=f"no value ({missing:,})")
    axes.figure.legend(title=plain(name), loc="outside lower left", ncols=2, alignment="left")


def numbers_of(colors: Sequence[str]) -> list[float] | None:
    """Return the colors as numbers, nan for missing ones; None if a cell is not a number or all are missing."""
    try:
        numbers = [math.nan if is_missing(color) else float(color) for color in colors]
    except ValueError:
        return None
    return None if all(map(math.isnan, numbers)) else numbers
