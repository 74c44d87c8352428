# SPDX-License-Identifier: Apache-2.0
"""README's commands are right: the scripts exist, and every training command composes and checks."""

import re
import shlex
import subprocess
import sys

import pytest

from .conftest import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)


def test_the_two_commands_that_open_it_exist() -> None:
    scripts = [block.strip() for block in BLOCKS if block.startswith("bash scripts/")]
    assert scripts == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    for script in scripts:
        assert (ROOT / script.split()[1]).is_file()
        subprocess.run(["bash", "-n", script.split()[1]], cwd=ROOT, check=True)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "pretrain.py" in block])
def test_training_commands_compose(block: str) -> None:
    change, command = block.split("\n", 1)
    words = shlex.split(command.replace("\\\n", " ").replace("$PWD", "/data"))
    assert words[0] == "python"
    run = subprocess.run(
        [sys.executable, *words[1:], "--cfg", "job"],
        cwd=ROOT / change.removeprefix("cd "), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "micro_batch_size" in run.stdout


def test_every_option_it_names_is_known() -> None:
    from bionemo.config.compose import load

    example = ROOT / "examples" / "protein" / "esm2nv" / "conf"
    rows = re.findall(r"\| `((?:[\w.]+=[^`,]+)+)` \|", README)
    assert len(rows) >= 3
    for row in rows:
        load("pretrain_esm2_8M", ["model.data.dataset_path=x", *row.split()], example)
    for size in ("35M", "150M", "650M", "3B", "15B"):
        load(f"pretrain_esm2_{size}", ["model.data.dataset_path=x"], example)
