# SPDX-License-Identifier: Apache-2.0
"""What is kept of a downstream run: the head, and a report of how good it is."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning import metrics, report
from bionemo.finetuning.heads import Head
from bionemo.finetuning.output_files import HEAD, RUN


class Outcome(NamedTuple):
    """What training came to.

    Attributes:
        encoder: the model that the head reads.
        head: as it was best.
        best: number from 1, in the history.
        history: for each validation, or epoch, its `epoch`, `train_loss`, and figures of the validation split.
        test: answers [R, C] and targets [R] of the test split.
        run: identity of the run.
        more: what else the report tells.
    """

    encoder: Path
    head: Head
    best: int
    history: Sequence[Mapping[str, float]]
    test: tuple[Tensor, Tensor] | None
    run: str
    more: Mapping[str, Any] = {}


def keep(outcome: Outcome, cfg: DownstreamConfig, directory: Path, classes: tuple[str, ...]) -> None:
    """Write `head.safetensors`, `report.json` and `report.png`, in this order, and tell.

    Raises:
        OSError: when one cannot be written; each is whole or as it was.
    """
    history = outcome.history
    figures: dict[str, Any] = {"name": cfg.name, "encoder": str(outcome.encoder), RUN: outcome.run, **outcome.more}
    if outcome.best:
        best = history[outcome.best - 1]
        figures["epoch"] = best["epoch"]
        figures |= {name: value for name, value in best.items() if name.startswith("val_")}
    answers, targets = outcome.test or (None, None)
    if outcome.test:
        figures |= {f"test_{name}": value for name, value in metrics.figures_of(*outcome.test).items()}
    encoder = redact_text(str(outcome.encoder))
    told = {"classes": list(classes), "task_type": cfg.model.data.task_type, "encoder": encoder, RUN: outcome.run}
    # A single metadata entry: safetensors writes several in random order, and the file must be reproducible.
    write_atomic(directory / HEAD, save(outcome.head.state_dict(), {"task": json.dumps(told)}))
    report.write(directory, redact_tree(figures), history, answers, targets, classes)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name.startswith("test_"))
    say(f"best epoch {figures['epoch']:.4g}{': ' + shown if shown else ''}" if outcome.best else shown)
    say(f"head, report and picture are in {directory}")


def say(line: str) -> None:
    """Tell the user."""
    print(redact_text(line), flush=True)
