# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the preparation tests."""

from collections.abc import Iterator

import pytest

from bionemo.preparation import pool


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    """Use spawn: the only fork server of this process is for the training tests and preloads other modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_START_METHOD", "spawn")
        yield
