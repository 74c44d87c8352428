# SPDX-License-Identifier: Apache-2.0
"""What came of a downstream run: `report.json` for programs, `report.png` for people."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bionemo.common.files import write_atomic
from bionemo.finetuning import metrics
from bionemo.finetuning.output_files import PICTURE, REPORT

_MOST_CLASSES = 20  # whose names fit beside a picture


def write(
    directory: Path, figures: Mapping[str, Any], history: Sequence[Mapping[str, float]], answers: Tensor | None,
    targets: Tensor | None, classes: Sequence[str],
) -> None:  # fmt: skip
    """Write both.

    Args:
        directory: of the run.
        figures: what it comes to.
        history: of its epochs.
        answers: on the test split [R, C]; None: it was not tested.
        targets: what they should be [R].
        classes: names of the C classes; none where a number is asked for.

    Raises:
        OSError: when one cannot be written.
    """
    told = dict(figures)
    if classes and answers is not None and targets is not None:
        told["confusion"] = metrics.confusion(answers, targets)
    text = json.dumps({**told, "classes": list(classes), "epochs": list(history)}, indent=1)
    write_atomic(directory / REPORT, text + "\n")
    _draw(directory / PICTURE, history, answers, targets, classes, told)


def _draw(
    path: Path, history: Sequence[Mapping[str, float]], answers: Tensor | None, targets: Tensor | None,
    classes: Sequence[str], told: Mapping[str, Any],
) -> None:  # fmt: skip
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [each["epoch"] for each in history]
    for name in ("train_loss", "val_loss"):
        if history and name in history[0]:
            left.plot(epochs, [each[name] for each in history], label=name.replace("_loss", ""))
    left.set(xlabel="epoch", ylabel="loss")
    left.legend()
    if answers is None or targets is None:
        right.set_axis_off()
    elif classes:
        counts = torch.tensor(told["confusion"])
        right.imshow(counts / counts.sum(1, keepdim=True).clamp_min(1), vmin=0, vmax=1, cmap="Blues")
        right.set(xlabel="answer", ylabel="truth", title=f"test accuracy {told['test_accuracy']:.1f} %")
        if len(classes) <= _MOST_CLASSES:
            right.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
            right.set_yticks(range(len(classes)), classes)
    else:
        right.scatter(targets.cpu(), answers.squeeze(1).cpu(), s=4)
        low, high = float(targets.min()), float(targets.max())
        right.plot([low, high], [low, high], color="grey", linewidth=0.8)
        rho = told.get("test_spearman")
        right.set(xlabel="truth", ylabel="answer", title="" if rho is None else f"test Spearman {rho:.3f}")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_atomic(path, picture.getvalue())
