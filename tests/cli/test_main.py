# SPDX-License-Identifier: Apache-2.0
"""The `bionemo` command runs every command, imports only what it needs, and reports unknown commands in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.cli import main as entry
from bionemo.cli.main import COMMANDS, main
from tests.conftest import ROOT

HEAVY = ("torch", "numpy", "lightning", "megatron", "nemo", "transformers", "pandas")


SCRIPT = f"""
import sys
from bionemo.cli.main import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def run(*arguments: str) -> tuple[int, str, str]:
    """Return exit status, output, and the heavy modules that were imported, after any errors."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_every_command_has_a_module() -> None:
    assert set(COMMANDS) <= {path.stem for path in Path(entry.__file__).parent.glob("*.py")}


def test_help_lists_every_command() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        status, output, error = run(*arguments)
        assert (status, error) == (0, "[]\n")
        for name, description in COMMANDS.items():
            assert f"  {name} " in output
            assert description in output


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own(name: str) -> None:
    status, output, error = run(name, "--help")
    assert status == 0, error
    assert f"usage: bionemo {name}" in output
    assert error == "[]\n"  # fast: nothing heavy is imported


def test_an_unknown_command_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bionemo", "pretrian"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: unknown command 'pretrian': choose one of {', '.join(COMMANDS)}\n"


def test_another_package_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "mylab.py").write_text("import sys\ndef main(): print(sys.argv)\n")
    (tmp_path / "mylab-1.dist-info").mkdir()
    (tmp_path / "mylab-1.dist-info" / "METADATA").write_text("Name: mylab\nVersion: 1\n")
    (tmp_path / "mylab-1.dist-info" / "entry_points.txt").write_text("[bionemo.commands]\nmine = mylab:main\n")
    command = [sys.executable, "-c", SCRIPT, "mine", "--x"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout == "['bionemo mine', '--x']\n"


def test_aliases_run_the_same_commands() -> None:
    for name in sorted(set(COMMANDS) - {"checkpoint", "doctor", "evaluate", "plan", "report"}):
        path = ROOT / "bionemo" / f"{name}.py"
        alias = path if path.exists() else ROOT / "bionemo" / name / "__main__.py"
        assert f"from bionemo.cli.{name} import main" in alias.read_text(), name


@pytest.mark.parametrize(
    "command",
    [["-c", "from bionemo.cli.main import main; main()"], pytest.param(["-m", "bionemo.cli"], marks=pytest.mark.slow)],
)
def test_a_run_on_two_devices_starts_the_other_process(command: list[str], tmp_path: Path) -> None:
    overrides = [
        "pretrain", "--config-name=pretrain_esm2_mock", f"--config-path={ROOT}/examples/protein/esm2nv/conf",
        "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2",
        "model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2",
        f"exp_manager.exp_dir={tmp_path}/run",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command, *overrides], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=900
    )
    assert done.returncode == 0, done.stderr
    lines = (done.stderr + done.stdout).splitlines()
    assert sum(" on 2 x cpu" in line for line in lines) == 1, lines
    assert len(lines) == len(set(lines)), lines  # only rank 0 prints
