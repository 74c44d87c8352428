# SPDX-License-Identifier: Apache-2.0
"""Fixture with a model for tests of labelled tasks."""

from pathlib import Path

import pytest

from tests.support.huggingface import theirs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an ESM-2 with random weights; return its path."""
    path = tmp_path_factory.mktemp("model") / "hf"
    theirs(path)
    return path
