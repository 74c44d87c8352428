# SPDX-License-Identifier: Apache-2.0
"""What the tests of labelled tasks share."""

from pathlib import Path

import pytest

from tests.interop.test_huggingface_esm import theirs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ESM-2 of random weights."""
    path = tmp_path_factory.mktemp("model") / "hf"
    theirs(path)
    return path
