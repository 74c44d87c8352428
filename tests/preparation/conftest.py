# SPDX-License-Identifier: Apache-2.0
"""What the tests of preparation share."""

from collections.abc import Iterator

import pytest

from bionemo.preparation import pool


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    """Leave the one fork server of this process to the tests of training, who have it import something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_START_METHOD", "spawn")
        yield
