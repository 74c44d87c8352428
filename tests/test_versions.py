# SPDX-License-Identifier: Apache-2.0
"""Versions of Python and torch in pyproject.toml are supported: sources compile, installation and training work."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from tests.conftest import ROOT
from tests.support.runs import TINY

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCH = re.search(
    r'"([\d.]+)" if sys.version_info < \(3, 12\) else "([\d.]+)"', (ROOT / "setup/install.sh").read_text()
)
COMPILE = """
import sys
for path in sys.stdin.read().split("\\0"):
    compile(open(path, encoding="utf-8").read(), path, "exec")
"""


@cache
def interpreter(version: str) -> str | None:
    """Return a Python of this version from PATH or pyenv, or None if none starts."""
    places = [
        shutil.which(f"python{version}"),
        *Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"),
    ]
    for place in map(str, filter(None, places)):
        answer = subprocess.run(
            [place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if answer.stdout.strip() == version:
            return place
    return None


def of(version: str) -> str:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"there is no Python {version} here")
    return found


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_versions_in_pyproject() -> None:
    assert 'requires-python = ">=3.10,<3.14"' in project()
    assert re.findall(r"Programming Language :: Python :: (3\.\d+)", project()) == PYTHONS
    assert '"torch>=2.11,<2.16"' in project()
    assert TORCH is not None
    assert TORCH.groups() == ("2.13.0", "2.15.0")


def test_torch_has_the_arguments_that_are_used() -> None:
    """torch 2.10 has neither."""
    assert {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


@pytest.mark.parametrize("version", PYTHONS)
def test_all_sources_compile(version: str) -> None:
    sources = [str(path) for path in tracked("*.py", "scripts/bcprun")]
    assert len(sources) > 300
    done = subprocess.run(
        [of(version), "-c", COMPILE], input="\0".join(sources), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_only_standard_library_names_of_every_version_are_used(version: str) -> None:
    """Checked with mypy's stubs of the standard library."""
    arguments = [
        "-m",
        "mypy",
        "--python-version",
        version,
        "--cache-dir",
        str(ROOT / ".mypy_cache" / f"for-{version}"),
    ]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_other_python_versions_are_rejected_before_installation(tmp_path: Path) -> None:
    (tmp_path / "setup" / "requirements").mkdir(parents=True)
    for name in ("pyproject.toml", "setup/install.sh", "setup/requirements/dev.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    old = tmp_path / "python"
    old.write_text('#!/bin/bash\n[ "$1" = -c ] && { echo 3.9; exit 1; }\ntouch installed\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "setup" / "install.sh"], env=os.environ | {"PYTHON": str(old)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"error: {old} is Python 3.9: set PYTHON to one of 3.10 to 3.13\n"
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / "installed").exists()


def see_that_there_is_a_build(python: str, torch_version: str) -> None:
    """Skip if pip would download a CUDA build of several gigabytes for a machine without a GPU."""
    arguments = [
        python,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
        "--report",
        "-",
    ]
    answer = subprocess.run(
        [*arguments, f"torch=={torch_version}"], capture_output=True, text=True, check=False, timeout=600
    )
    if answer.returncode:
        pytest.skip(f"pip finds no torch {torch_version} for {python}: {answer.stderr.strip().splitlines()[-1]}")
    (found,) = json.loads(answer.stdout)["install"]
    of_cuda = any(re.match("nvidia-|cuda-", needed) for needed in found["metadata"].get("requires_dist", []))
    if of_cuda and not torch.cuda.is_available():
        pytest.skip(
            f"pip finds torch {torch_version} for {python} as a build for CUDA alone: give one for CPUs "
            "(PIP_FIND_LINKS)"
        )


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_installation_training_and_resume(python: str, tmp_path: Path) -> None:
    """Use a fresh checkout and its own environment."""
    assert TORCH is not None
    torch_version = TORCH[1 if python in ("3.10", "3.11") else 2]
    see_that_there_is_a_build(of(python), torch_version)
    checkout = tmp_path / "checkout"
    for path in tracked():
        copy = checkout / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}

    def say(*arguments: str | Path) -> str:
        done = subprocess.run(
            arguments, cwd=checkout, env=environment | {"PYTHON": of(python)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    say("bash", "setup/install.sh")
    installed = checkout / ".venv" / "bin" / "python"
    versions = say(installed, "-c", "import sys, torch; print('%d.%d' % sys.version_info[:2], torch.__version__)")
    assert versions.split()[0] == python
    assert versions.split()[1].startswith(torch_version)
    train = (installed, "-m", "bionemo.pretrain", "--config-name=pretrain_esm2_mock", *TINY, "exp_manager.exp_dir=out")
    assert "step 4 of 4" in say(*train, "trainer.max_steps=4")
    resumed = say(*train, "trainer.max_steps=8")
    assert "resuming from" in resumed
    assert "step 8 of 8" in resumed
