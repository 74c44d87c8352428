# SPDX-License-Identifier: Apache-2.0
"""Plot of a fine-tuning run: losses, and a parity plot, the confusion matrix, or a bar for each label or target.

R rows, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.common.figures import color_bar, new_figure, plain, plot_points, render, spearman, with_interval

_NUMBERED, _NAMED = 12, 20  # classes up to which cells have numbers, and axes the names of the classes
_COUNTED = 6  # classes up to which cells have the numbers of rows, too
_FEW = 20  # epochs up to which losses have markers
_CELL = 0.36  # inches, in which the numbers fit


def plot_run(
    history: Sequence[Mapping[str, float]], test: tuple[Tensor, Tensor] | None, classes: Sequence[str],
    confusion: Sequence[Sequence[int]] | None, targets: Mapping[str, Mapping[str, float]] | None, name: str, unit: str,
    rows: str = "sequences",
) -> dict[str, bytes]:  # fmt: skip
    """Plot the losses, and a plot of the test split; a note says if there is none.

    Args:
        history: `epoch`, `train_loss` and `val_loss` of each epoch or validation.
        test: predictions [R, 1] and targets [R] or [R, 1] of the test split, if there is one; used only without the
            following two.
        classes: names of the classes, if there are any.
        confusion: [C, C], number of rows of each true class (first index) and predicted class.
        targets: metrics of several labels or targets.
        name: of the target.
        unit: of the loss.
        rows: what the rows are.

    Returns:
        The plot in each format, by extension.

    Raises:
        UserError: if Matplotlib is not installed.
    """
    cell = _CELL if len(classes) <= _NUMBERED else _CELL / 2
    width = max(3.2, 1.6 + cell * (len(classes) if len(classes) <= _NAMED else 0))
    height, is_wide = max(3.1, width - 0.4), width > 4  # a page is 7 inches wide
    size = (max(7, width), 2.4 + height) if is_wide else (7, height)
    with new_figure(*size) as figure:
        losses, axes = figure.subplots(
            1 + is_wide, 2 - is_wide, gridspec_kw={"height_ratios": [2.4, height]} if is_wide else {}
        )
        for key, label in (("train_loss", "training"), ("val_loss", "validation")):
            if history and key in history[0]:
                style = "o-" if len(history) <= _FEW else "-"
                losses.plot([each["epoch"] for each in history], [each[key] for each in history], style, label=label)
        losses.set(xlabel="epoch", ylabel=f"loss, {unit}")
        losses.locator_params(axis="x", integer=True)
        # To the right, since a factor of the numbers, such as 1e8, is above the left end.
        losses.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
        losses.set_visible(losses.has_data())
        try:
            if confusion is not None:
                _plot_confusion(
                    axes, np.array(confusion), [plain(each if each.strip() else repr(each)) for each in classes]
                )
                axes.set(xlabel=plain(f"{name}, predicted"), ylabel=plain(f"{name}, true"))
                axes.set_title(f"test split, n = {np.sum(confusion):,} {rows}")
            elif targets is not None:
                _plot_bars(axes, targets)
            elif test is not None:
                predictions_R, targets_R = (each.double().reshape(-1).cpu().numpy() for each in test)
                _plot_parity(axes, predictions_R, targets_R)
                axes.set(xlabel=plain(f"{name}, measured"), ylabel=plain(f"{name}, predicted"))
                title = f"test split, n = {len(targets_R):,} {rows}, 95 % intervals"
                axes.set_title(f"{title}\n{axes.get_title('left')}", fontsize=7)
        except UserError as error:
            notify(f"there is no plot of the test split: {error}")
        axes.set_visible(axes.has_data())
        return {suffix: render(figure, suffix) for suffix in (".svg", ".png")}


def _plot_parity(axes: Any, predictions_R: NDArray[Any], targets_R: NDArray[Any]) -> None:
    """Plot predicted against measured numbers, with statistics above the axes."""
    texts = [
        with_interval(label, statistic, predictions_R, targets_R)
        for label, statistic in (
            ("R²", lambda x, y, axis: 1 - ((x - y) ** 2).mean(axis) / y.var(axis)),
            ("RMSE", lambda x, y, axis: np.sqrt(((x - y) ** 2).mean(axis))),
            ("Spearman's ρ", spearman),
        )
    ]
    plot_points(axes, targets_R, predictions_R, alpha=0.6)
    ends = min(axes.get_xlim() + axes.get_ylim()), max(axes.get_xlim() + axes.get_ylim())
    axes.plot(ends, ends, color="black", linewidth=0.8, linestyle="--")  # equal numbers
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.set_title("\n".join(texts))


def _plot_bars(axes: Any, targets: Mapping[str, Mapping[str, float]]) -> None:
    """Plot a metric of each label or target, or of the first ones."""
    shown = [*targets.items()][:_NAMED]
    metric = "spearman" if any("spearman" in each for each in targets.values()) else "auprc"
    axes.barh([plain(name) for name, _ in shown], [each.get(metric, 0.0) for _, each in shown])
    axes.invert_yaxis()
    label = {"spearman": "Spearman's ρ", "auprc": "average precision, %"}[metric]
    axes.set(xlabel=f"{label}, test split{f', first {_NAMED}' if len(targets) > _NAMED else ''}")


def _plot_confusion(axes: Any, counts_CC: NDArray[Any], classes: Sequence[str]) -> None:
    """Plot the shares of each true class, in the cells, too, if there are few classes."""
    shares_CC = 100 * counts_CC / counts_CC.sum(1, keepdims=True).clip(1)
    color_bar(axes, axes.imshow(shares_CC, cmap="Blues", vmin=0, vmax=100), "share of the true class, %")
    for (row, column), share in np.ndenumerate(shares_CC):
        if len(classes) <= _NUMBERED:
            count = f"{counts_CC[row, column]:,}\n" if len(classes) <= _COUNTED else ""
            axes.text(column, row, f"{count}{share:.0f} %", ha="center", va="center", fontsize=7,
                      color="white" if share > 72 else "black")  # fmt: skip
    names = classes if len(classes) <= _NAMED else []
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, classes)) > 3 else 0)
    axes.set_yticks(range(len(names)), names)
    axes.spines[:].set_visible(True)
