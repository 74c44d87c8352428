# SPDX-License-Identifier: Apache-2.0
"""OpenMP threads sleep soon while they wait, unless the user has set how they wait."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_libgomp_reports_the_number_of_rounds(variables: dict[str, str], expected: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", "import bionemo, torch"], capture_output=True, text=True, check=True,
        env=environment | variables | {"OMP_DISPLAY_ENV": "verbose"},
    )  # fmt: skip
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [expected]
