# SPDX-License-Identifier: Apache-2.0
"""Fixture with two checkpoints, of which tests damage the second."""

from pathlib import Path

import pytest

from tests.checkpoint.samples import FILES, names, save


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Return a directory with the checkpoints of steps 1 and 2, written by two processes."""
    for step in (1, 2):
        save(tmp_path / f"step={step}", step, processes=2)
        assert names(tmp_path / f"step={step}") == {*FILES}
    return tmp_path / "step=1", tmp_path / "step=2"
