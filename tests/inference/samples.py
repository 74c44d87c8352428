# SPDX-License-Identifier: Apache-2.0
"""Predictions of sequences for several tests."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bionemo.cli.predict import predict
from bionemo.config.compose import load
from bionemo.config.schema import InferConfig
from bionemo.inference import predict_files as running

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
LENGTHS = (10, 1, 57, 90, 33, 2, 130, 41, 200, 12)  # the maximum length is 94
ALL = "model.downstream_task.outputs=[embeddings,begin,hiddens,logits,pseudo_perplexity]"


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list(RESIDUES), length)) for length in lengths]


def go(model: Path, data: Path, output: Path, *overrides: str) -> None:
    given = [f"model.downstream_task.restore_from_path={model}", f"model.data.dataset_path='{data}'",
             f"model.data.output_fname={output}", "trainer.accelerator=cpu"]  # fmt: skip
    predict(load("predict", [*given, *overrides], schema=InferConfig))


def command(model: Path, data: Path, output: Path, *overrides: str) -> list[str]:
    given = [f"model.downstream_task.restore_from_path={model}", f"model.data.dataset_path={data}",
             f"model.data.output_fname={output}", "trainer.accelerator=cpu", ALL]  # fmt: skip
    return [sys.executable, "-m", "bionemo.predict", *given, *overrides]


def same(one: Path, other: Path) -> bool:
    """Return whether two .npz files have bitwise equal arrays, except for the provenance."""
    a, b = np.load(one), np.load(other)
    names = set(a.files) - {"provenance"}
    return bool(a.files == b.files and all(np.array_equal(a[key], b[key]) for key in names))


def parts_of_150_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the size of the parts from which a prediction is assembled."""
    monkeypatch.setattr(running, "_LETTERS", dict.fromkeys(running._LETTERS, 150))
