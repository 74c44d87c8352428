# SPDX-License-Identifier: Apache-2.0
"""Number of statements of each package, so that growth is a decision."""

import ast
from collections import Counter

from tests.test_boundaries import ALIASES, FILES

# Lower a number when code is removed. Raise it in the commit that needs more, with the reason in its message.
LIMITS = {
    "aliases": 46,
    "analysis": 455,
    "checkpoint": 628,
    "cli": 1_619,
    "common": 998,
    "config": 2_157,
    "data": 3_924,
    "evaluation": 1_943,
    "experiment": 510,
    "finetuning": 1_713,
    "formats": 1_773,
    "inference": 1_803,
    "launch": 880,
    "megatron": 1_956,
    "models": 866,
    "planning": 486,
    "preparation": 2_471,
    "tokenizers": 324,
    "training": 2_190,
}


def test_packages_do_not_grow_unnoticed() -> None:
    counts: Counter[str] = Counter()
    for name, path in FILES.items():
        package = [*name.split("."), ""][1]
        number = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))
        counts["aliases" if package in ALIASES or not package else package] += number
    assert set(counts) == set(LIMITS)
    assert {name: number for name, number in counts.items() if number > LIMITS[name]} == {}
