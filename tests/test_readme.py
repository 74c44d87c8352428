# SPDX-License-Identifier: Apache-2.0
"""Commands of README and docs/ are valid: scripts exist, training commands compose and pass validation."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path for place in ("how-to", "explanation", "reference") for path in (ROOT / "docs" / place).glob("*.md")
)
ALL = "\n".join([README, *(path.read_text() for path in PAGES)])
BLOCKS = re.findall(r"```bash\n(.*?)```", ALL, flags=re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_quickstart_scripts_exist() -> None:
    scripts = [block.strip() for block in BLOCKS if block.startswith("bash scripts/")]
    assert scripts == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    for script in scripts:
        assert (ROOT / script.split()[1]).is_file()
        subprocess.run(["bash", "-n", script.split()[1]], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "block", sorted({block for block in BLOCKS if block.startswith("cd examples") and "pretrain.py" in block})
)
def test_training_commands_compose(block: str) -> None:
    change, command = block.split("\n", 1)
    arguments = shlex.split(command.replace("\\\n", " ").replace("$PWD", "/data"))
    assert arguments[0] == "python"
    run = subprocess.run(
        [sys.executable, *arguments[1:], "--cfg", "job"],
        cwd=ROOT / change.removeprefix("cd "), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "micro_batch_size" in run.stdout


def test_documented_options_exist() -> None:
    from bionemo.config.compose import load

    example = ROOT / "examples" / "protein" / "esm2nv" / "conf"
    rows = re.findall(r"\| `((?:[\w.]+=[^`,]+)+)` \|", ALL)
    assert len(rows) >= 3
    for row in rows:
        load("pretrain_esm2_8M", ["model.data.dataset_path=x", *row.split()], example)
    for size in ("35M", "150M", "650M", "3B", "15B"):
        load(f"pretrain_esm2_{size}", ["model.data.dataset_path=x"], example)


def test_the_slurm_guide_states_the_defaults() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs" / "how-to" / "slurm.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) >= 10
    defaults = yaml.safe_load((ROOT / "conf" / "cluster" / "bcm.yaml").read_text())
    for key, shown in rows:
        assert yaml.safe_load(shown) == defaults[key], key
