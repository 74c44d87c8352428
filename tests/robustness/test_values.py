# SPDX-License-Identifier: Apache-2.0
"""Each number in a configuration gets invalid values: a one-line error, or the run succeeds."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from tests.robustness.commands import Outcomes, Server
from tests.robustness.scenarios import kept, scenarios

pytestmark = pytest.mark.slow
VALUES = ["-1", "0", "1.5", "nan", "inf", "1e30", "''"]
# These values request a run without an end.
ENDLESS = {"trainer.max_steps=-1", "trainer.max_time=inf"}


def numbers(config: Any, key: str = "") -> Iterator[str]:
    """Yield keys of numbers and of null values."""
    if isinstance(config, dict):
        for name, below in config.items():
            yield from numbers(below, f"{key}.{name}" if key else str(name))
    elif config is None or (isinstance(config, int | float) and not isinstance(config, bool)):
        yield key


_NAN = re.compile(r"(?<!/)\bnan\b(?!/| has no effect)", re.IGNORECASE)  # neither a directory nor an ignored value
_ALIKE = ".test.", ".val.", "uf90", "fasta_fields_mmap"  # keys that are read like others of the same name
KEYS = sorted(key for key in numbers(asdict(load("pretrain_esm2_8M", ["model.data.dataset_path=x"])))
              if not any(part in key for part in _ALIKE))  # fmt: skip


@pytest.mark.parametrize("part", range(8))
def test_invalid_numbers(part: int, server: Server, tmp_path: Path) -> None:
    scenario = scenarios(Path())["pretrain"]
    outcomes = Outcomes()
    for key in KEYS[part::8]:
        for value in VALUES:
            override = f"{key}={value}"
            if override in ENDLESS:
                continue
            directory = tmp_path / "case"
            overrides = [*scenario.arguments(directory), override]
            try:
                load("pretrain_esm2_8M", overrides[2:])
            except UserError as error:
                outcomes.judge(override, "several lines" if "\n" in str(error) else "")
                continue
            except Exception as error:
                outcomes.judge(override, f"not a UserError: {error!r}")
                continue
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            scenario.prepare(directory)
            done = server.run(overrides, directory)
            problem = done.defect() or ("" if kept(directory) else "a file of the user is lost")
            if not problem and done.status == 0 and _NAN.search(done.console):
                problem = "a success with NaN"
            outcomes.judge(override, problem, done.console)
    outcomes.report()
