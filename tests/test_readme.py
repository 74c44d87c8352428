# SPDX-License-Identifier: Apache-2.0
"""Commands of README and docs/ are valid: scripts exist, training commands compose and pass validation."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

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


GUIDES = [ROOT / "docs" / "how-to" / name for name in ("slurm.md", "base-command.md")]


def launches(guide: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in commands if "bionemo.launch" in line or ("/scripts/" in line and "bcprun" not in line)]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_commands_of_the_guides_can_be_rendered(guide: Path) -> None:
    commands = launches(guide)
    assert len(commands) >= 4
    for command in commands:
        line = command if "--dry-run" in command else f"{command} --dry-run"
        environment = {**os.environ, "NGC_ARRAY_SIZE": "2", "NGC_GPUS_PER_NODE": "8"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert "trainer:\n" in done.stdout or "ngc batch run" in done.stdout


def test_the_slurm_guide_states_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", GUIDES[0].read_text(), flags=re.MULTILINE)
    assert len(rows) >= 10
    defaults = yaml.safe_load((ROOT / "conf" / "cluster" / "bcm.yaml").read_text())
    for key, shown in rows:
        assert yaml.safe_load(shown) == defaults[key], key
