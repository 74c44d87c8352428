# SPDX-License-Identifier: Apache-2.0
"""Small tables of labelled sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def peptides(count: int, length: int = 20) -> list[str]:
    """Return different sequences of this length."""
    rng = np.random.default_rng(1)
    return ["".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), length)) for _ in range(count)]


def write(path: Path, header: str, rows: Sequence[Sequence[Any]]) -> Path:
    """Write a CSV file."""
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path
