# SPDX-License-Identifier: Apache-2.0
"""Style of all plots: sizes in inches of a printed page, text of 7 and 8 points, colors for color-blind readers.

Matplotlib is used without pyplot, which needs a display and has global state. A column of a journal is 3.5 inches
wide, a page 7.
"""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bionemo.common.errors import UserError, optional_dependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color Universal Design", in another order: yellow, which is faint on white, is the last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
FORMATS = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # metadata that would differ each time
_STYLE: dict[Any, Any] = {
    "font.sans-serif": ["Arial", "Helvetica", "Liberation Sans", "DejaVu Sans"],  # journals prefer the first
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "figure.labelsize": 8, "legend.title_fontsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1,
    "lines.markersize": 3, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "image.cmap": "viridis", "savefig.dpi": 300, "pdf.fonttype": 42, "svg.fonttype": "none",
    "svg.hashsalt": "bionemo",
}  # fmt: skip
_RASTERIZED = 2000  # points in a .svg or .pdf file; more are an image, at 300 dots per inch
_RESAMPLED = 10**7  # rows in all resamples of a confidence interval


@contextmanager
def new_figure(width: float = 7.0, height: float = 2.8) -> Iterator["Figure"]:
    """Yield a figure of this size in inches, which is drawn and rendered in the `with` block.

    Raises:
        UserError: if Matplotlib is not installed.
    """
    with optional_dependency("plots", "a plot"):
        import matplotlib as mpl
        from cycler import cycler
        from matplotlib.figure import Figure
    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=PALETTE)}):
        yield Figure((width, height), layout="constrained")


def render(figure: "Figure", suffix: str = ".png") -> bytes:
    """Return a figure as a file of one of FORMATS: a PNG at 300 dots per inch, or an SVG or PDF whose text is text."""
    file = io.BytesIO()
    figure.savefig(file, format=suffix[1:], metadata=FORMATS[suffix])
    return file.getvalue()


def plain(text: str) -> str:
    """Return text as a label in lines of 32 letters, without the meaning of `$` (formulas) and `_` (hidden labels)."""
    return textwrap.fill(text.replace("$", r"\$").lstrip("_"), 32)


def plot_references(axes: "Axes", losses: Mapping[str, float]) -> None:
    """Plot losses to compare with as horizontal lines."""
    for number, (label, value) in enumerate(losses.items()):
        axes.axhline(value, color="black", linestyle=(0, (1 + 3 * number, 2)), linewidth=0.8, label=label)


def color_bar(axes: "Axes", image: Any, label: str, **options: Any) -> None:
    """Add a color bar as high as the axes, to their right."""
    axes.figure.colorbar(image, cax=axes.inset_axes((1.04, 0, 0.05, 1)), label=label, **options)


def plot_points(axes: "Axes", x: Any, y: Any, **options: Any) -> Any:
    """Plot points whose size depends on their number; many are transparent, and an image also in a vector format."""
    size = float(np.clip(2000 / max(len(x), 1), 1, 12))
    many = len(x) > _RASTERIZED
    return axes.scatter(
        x, y, **{"s": size, "linewidths": 0, "alpha": 0.5 if many else 1, "rasterized": many, **options}
    )


def with_interval(name: str, statistic: Callable[..., Any], *samples: Any) -> str:
    """Return a statistic of paired samples as text, with its 95 % confidence interval: `RMSE 0.52 [0.47, 0.58]`.

    Percentiles of 1,000 bootstrap resamples of the rows (fewer of more than 10,000 rows, at least 100; Efron 1979,
    "Bootstrap methods: another look at the jackknife"). Without an interval if resamples have no statistic.

    Args:
        name: of the statistic.
        statistic: function of the samples and `axis`, the axis of the rows.
        samples: [N] each.

    Raises:
        UserError: if the statistic is not defined.
    """
    from scipy.stats import bootstrap

    rows = len(samples[0])
    with np.errstate(all="ignore"), warnings.catch_warnings():  # values that are equal, perhaps of a resample only
        warnings.simplefilter("ignore")
        if rows < 2 or not np.isfinite(value := float(statistic(*samples, axis=-1))):
            raise UserError(f"{name} is not defined: there is one point, or all values are equal")
        low, high = bootstrap(
            samples, statistic, paired=True, vectorized=True, method="percentile", random_state=0,
            n_resamples=min(1000, max(100, _RESAMPLED // rows)), batch=max(1, _RESAMPLED // rows // 10),
        ).confidence_interval  # fmt: skip
    texts = [f"{each:#.3g}".rstrip(".").replace("-", "\N{MINUS SIGN}") for each in (value, low, high)]
    return f"{name} {texts[0]}" + (f" [{texts[1]}, {texts[2]}]" if np.isfinite([low, high]).all() else "")


def spearman(x: Any, y: Any, axis: int = -1) -> Any:
    """Return the rank correlation along an axis; nan if all numbers are equal."""
    from scipy.stats import rankdata

    x, y = (ranks - ranks.mean(axis, keepdims=True) for ranks in (rankdata(x, axis=axis), rankdata(y, axis=axis)))
    return (x * y).sum(axis) / np.sqrt((x**2).sum(axis) * (y**2).sum(axis))
