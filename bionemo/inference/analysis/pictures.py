# SPDX-License-Identifier: Apache-2.0
"""Pictures of what was computed, as PNG files."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bionemo.inference.analysis.variant_files import Measured
from bionemo.inference.analysis.variants import AMINO_ACIDS
from bionemo.inference.outputs import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PER_ROW = 100  # residues of a scan
_MOST_KINDS = 10  # that have a colour of their own


def draw_scan(path: Path, scores: Floats, sequence: str, offset: int = 0) -> None:
    """Draw the scores of every substitution as a heatmap, a hundred residues to a row; dots mark the wild type.

    Args:
        path: the file.
        scores: [n, 20] of `variants.scan`.
        sequence: of the wild type.
        offset: the first residue has the number 1 + offset.
    """
    count = -(-len(scores) // _PER_ROW)
    figure = _figure(14, 0.6 + 2.9 * count)
    rows: np.ndarray = figure.subplots(count, squeeze=False)[:, 0]
    most = max(float(np.percentile(np.abs(scores), 99)), 1e-6)
    for number, axes in enumerate(rows):
        first = number * _PER_ROW
        part, letters = scores[first : first + _PER_ROW], sequence[first : first + _PER_ROW]
        extent = (first + offset + 0.5, first + offset + len(part) + 0.5, 19.5, -0.5)
        image = axes.imshow(part.T, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", extent=extent)
        known = [(first + offset + 1 + place, AMINO_ACIDS.find(letter)) for place, letter in enumerate(letters)]
        x, y = np.array([each for each in known if each[1] >= 0]).reshape(-1, 2).T
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set_yticks(range(20), list(AMINO_ACIDS), fontsize=7)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(first + offset + 0.5, first + offset + min(_PER_ROW, len(scores)) + 0.5)
    rows[-1].set_xlabel("residue")
    figure.colorbar(image, ax=rows.tolist(), label="log p(mutant) - log p(wild type)", aspect=12 * count, pad=0.01)
    figure.savefig(path, dpi=120, format="png")


def draw_scores(path: Path, scores: Floats, values: Measured, rho: float, name: str) -> None:
    """Draw scores [N] against what was measured [N]."""
    figure = _figure(5, 4.5)
    axes = _open_axes(figure)
    axes.plot(values, scores, ".", color="tab:blue", markersize=4, alpha=0.5)
    axes.set(xlabel=f"{_plain(name)}, measured", ylabel="zero-shot score, nats", title=f"Spearman's rho {rho:.3f}")
    figure.savefig(path, dpi=120, format="png")


def draw_contacts(path: Path, predicted: Floats, name: str, known: Floats | None = None) -> None:
    """Draw probabilities [n, n]; where contacts [n, n] are known, these stand below the diagonal."""
    figure = _figure(5.6, 5)
    axes = figure.subplots()
    shown = predicted if known is None else np.triu(predicted) + np.tril(np.nan_to_num(known), -1)
    ends = (0.5, len(predicted) + 0.5)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, extent=(*ends, *ends[::-1]), interpolation="nearest")
    axes.set(xlabel="residue", ylabel="residue")
    axes.set_title(_plain(name), fontsize=9, wrap=True)
    figure.colorbar(image, label="probability of a contact")
    figure.savefig(path, dpi=120, format="png")


def draw_map(path: Path, places: Floats, colors: Sequence[str] | None = None, name: str = "") -> None:
    """Draw sequences as points [N, 2], coloured by a number, or by the ten most frequent kinds."""
    figure = _figure(7, 5.5)
    axes = _open_axes(figure)
    size, (x, y) = float(np.clip(2000 / len(places), 1, 20)), places.T
    if colors is None:
        axes.scatter(x, y, s=size, color="tab:blue", linewidths=0)
    elif (numbers := _numbers(colors)) is not None:
        image = axes.scatter(x, y, s=size, c=numbers, cmap="viridis", linewidths=0, plotnonfinite=False)
        figure.colorbar(image, label=_plain(name))
    else:
        _draw_kinds(axes, places, np.array(colors), name, size)
    axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=120, format="png")


def _draw_kinds(axes: "Axes", places: Floats, colors: np.ndarray, name: str, size: float) -> None:
    kinds = [kind for kind, _ in Counter(colors[colors != ""].tolist()).most_common(_MOST_KINDS)]
    others = ~np.isin(colors, kinds)
    if others.any():
        axes.scatter(places[others, 0], places[others, 1], s=size, color="lightgray", linewidths=0, label="others")
    for number, kind in enumerate(kinds):
        ours = colors == kind
        axes.scatter(places[ours, 0], places[ours, 1], s=size, color=f"C{number}", linewidths=0, label=_plain(kind))
    axes.legend(title=_plain(name), frameon=False, fontsize=7, markerscale=20 / size**0.5 / 4.5, loc="center left",
                bbox_to_anchor=(1, 0.5))  # fmt: skip


def _numbers(colors: Sequence[str]) -> np.ndarray | None:
    """As numbers, nan where there is nothing; None when one is no number, or there is none."""
    try:
        numbers = np.array([float(color or "nan") for color in colors])
    except ValueError:
        return None
    return None if np.isnan(numbers).all() else numbers


def _plain(text: str) -> str:
    """Text in which $ begins no formula."""
    return text.replace("$", r"\$")


def _open_axes(figure: "Figure") -> "Axes":
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")
