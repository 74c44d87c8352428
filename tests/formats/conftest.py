# SPDX-License-Identifier: Apache-2.0
"""Fixture that checks that reading an untrusted file has no side effects."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.formats.archives import MARK


@pytest.fixture
def sentinel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path of a file that must not be created; no other file may be written and no forbidden module imported."""
    for name in ("here", "temporary", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    modules = set(sys.modules)
    yield tmp_path / MARK
    assert not (tmp_path / MARK).exists()
    assert not any(any((tmp_path / name).iterdir()) for name in ("here", "temporary", "home"))
    assert not {"antigravity", "this", "pty", "turtle"} & (set(sys.modules) - modules)
