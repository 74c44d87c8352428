# SPDX-License-Identifier: Apache-2.0
"""Training, resuming and layouts work with the lowest and newest allowed releases; checkpoints move between them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.megatron.test_reshard import same_tensors
from tests.support.parallel_layouts import Layout
from tests.support.runs import TINY
from tests.test_versions import of

pytestmark = pytest.mark.slow
RESOLUTIONS = {"lowest-direct": "3.10", "highest": "3.13"}  # uv's name, version of Python
FIRST, SECOND = Layout(tensor=2), Layout(data=2, sharded=True)
EXCHANGE = """
import json, sys
from pathlib import Path
from tests.megatron.test_reshard import go_on_from_each, train_and_save
from tests.support.parallel_layouts import on_every_process
from tests.test_lowest_and_newest import FIRST, SECOND

if __name__ == "__main__":
    action, directory = sys.argv[1], Path(sys.argv[2])
    work = (FIRST, train_and_save) if action == "save" else (SECOND, go_on_from_each)
    arguments = () if action == "save" else ([FIRST],)
    print(json.dumps(on_every_process(*work, "esm2nv", directory, *arguments, directory=directory)))
"""


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Install the direct requirements into two environments; with torch for CUDA they take 11 GB."""
    place = tmp_path_factory.mktemp("environments")
    subprocess.run([sys.executable, "-m", "venv", place / "uv"], check=True)
    subprocess.run([place / "uv/bin/pip", "install", "--quiet", "uv"], check=True)
    found = {}
    for resolution, version in RESOLUTIONS.items():
        found[resolution] = place / resolution / "bin" / "python"
        for arguments in (
            ["venv", "--python", of(version), place / resolution],
            ["pip", "install", "--python", found[resolution], "--resolution", resolution, "-e", ROOT],
            ["pip", "install", "--python", found[resolution], "pytest>=8", "hypothesis"],
        ):
            run([place / "uv/bin/uv", *arguments], UV_CACHE_DIR=str(place / "cache"))
    yield found
    shutil.rmtree(place)


def run(command: list[str | Path], **environment: str) -> str:
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_layouts_and_updates(pythons: dict[str, Path], resolution: str) -> None:
    tests = ["tests/megatron/test_reshard.py", "tests/megatron/test_train_step.py", "tests/megatron/test_precision.py"]
    run([pythons[resolution], "-m", "pytest", "-p", "no:cacheprovider", *tests])


def test_a_run_goes_on_with_other_releases(pythons: dict[str, Path], tmp_path: Path) -> None:
    """Lowest, newest, lowest: the losses are those of one run, to rounding."""

    def train(resolution: str, name: str, steps: int) -> dict[str, float]:
        said = run([
            pythons[resolution], "-m", "bionemo.pretrain", "--config-name=pretrain_esm2_mock", *TINY,
            f"exp_manager.exp_dir={tmp_path / name}", "model.optim.sched.max_steps=12", f"trainer.max_steps={steps}",
        ])  # fmt: skip
        return {
            step: float(loss) for step, loss in re.findall(r"^step (\d+) of \d+  loss ([\d.]+)", said, re.MULTILINE)
        }

    resolutions = ("lowest-direct", "highest", "lowest-direct")
    parts = [train(each, "moved", steps) for each, steps in zip(resolutions, (4, 8, 12), strict=True)]
    assert [list(map(int, part)) for part in parts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    whole = train("highest", "whole", 12)
    assert parts[0] | parts[1] | parts[2] == pytest.approx(whole, abs=2e-4)


@pytest.mark.parametrize(("first", "second"), [list(RESOLUTIONS), list(reversed(RESOLUTIONS))])
def test_checkpoints_are_bitwise_equal(pythons: dict[str, Path], first: str, second: str, tmp_path: Path) -> None:
    """Tensors and positions that one environment saves are those that the other loads and saves, in another layout."""
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    run([pythons[first], script, "save", tmp_path], PYTHONPATH=str(ROOT))
    run([pythons[second], script, "load", tmp_path], PYTHONPATH=str(ROOT))
    same_tensors(tmp_path / str(FIRST), tmp_path / f"{FIRST}-by-{SECOND}")
