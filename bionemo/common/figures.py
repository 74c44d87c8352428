# SPDX-License-Identifier: Apache-2.0
"""Plots: matplotlib without pyplot, which needs a display and has global state."""

import io

from bionemo.common.errors import optional_dependency

with optional_dependency("plots", "a plot"):
    import matplotlib as mpl
    from matplotlib.figure import Figure


def new_figure(width: float = 9.0, height: float = 3.6) -> Figure:
    """Return a figure of this size in inches."""
    return Figure((width, height), layout="constrained")


def plain(text: str) -> str:
    """Return a label in which `$` starts no formula, without leading `_`, because legends omit such labels."""
    return text.replace("$", r"\$").lstrip("_")


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG element."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "bionemo"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
