# SPDX-License-Identifier: Apache-2.0
"""Number of statements of each package, so that growth is a decision."""

import ast
from collections import Counter

import pytest

from tests.test_boundaries import FILES

# Lower a number when code was removed. Raise it in the commit that needs more, with the reason in its message.
STATEMENTS = {
}


def count_statements() -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, path in FILES.items():
        package = [*name.split("."), ""][1]
        counts[package if package in STATEMENTS else "aliases"] += sum(
            isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text()))
        )
    return counts


@pytest.mark.parametrize("package", STATEMENTS)
def test_statements(package: str) -> None:
    assert count_statements()[package] <= STATEMENTS[package]
