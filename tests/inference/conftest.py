# SPDX-License-Identifier: Apache-2.0
"""Fixtures with models and sequences."""

from pathlib import Path

import pytest
from transformers import EsmForMaskedLM

from tests.inference.molecules import trained
from tests.inference.samples import parts_of_150_letters, sequences
from tests.support.huggingface import theirs


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained MegaMolBART."""
    path = tmp_path_factory.mktemp("molecules") / "model"
    trained(path)
    return path


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EsmForMaskedLM]:
    path = tmp_path_factory.mktemp("model") / "hf"
    return path, theirs(path)


@pytest.fixture
def model(reference: tuple[Path, EsmForMaskedLM]) -> Path:
    return reference[0]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of_150_letters(monkeypatch)


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """Write ten sequences, some on several lines."""
    path = tmp_path / "x.fasta"
    path.write_text(
        "".join(f">p{n} text\n{text[:60]}\n{text[60:]}\n".replace("\n\n", "\n") for n, text in enumerate(sequences()))
    )
    return path
