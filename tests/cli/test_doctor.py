# SPDX-License-Identifier: Apache-2.0
"""`bionemo doctor` reports what is installed, and tests the connections of the processes of a launcher."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bionemo.cli import doctor
from bionemo.cli.doctor import dependency_problems, describe_machine
from tests.conftest import ROOT

NUMPY = metadata.version("numpy")


def test_missing_and_unsuitable_requirements_are_reported() -> None:
    requirements = [
        f"numpy=={NUMPY}", "numpy>=999", "no-such-package>=1.2", "no-such-package; python_version < '3'",
        "no-such-extra>=3; extra == 'more'", "numpy; extra == 'more'",
    ]  # fmt: skip
    assert list(dependency_problems(requirements)) == [
        f"numpy {NUMPY} is installed, but >=999 is required: pip install 'numpy>=999'",
        "no-such-package is not installed: pip install 'no-such-package>=1.2'",
    ]
    assert list(dependency_problems(requirements, "more")) == [
        "no-such-extra is not installed: pip install 'no-such-extra>=3'"
    ]


def test_releases_that_an_extra_excludes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canonical SMILES of RDKit 2026.3.5 and 2026.3.6 depend on the order of the atoms of some molecules."""
    found = re.search(r'^molecules = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    monkeypatch.setattr(metadata, "requires", lambda name: [f"{found[1]}; extra == 'molecules'"])
    version = metadata.version
    for release, is_excluded in (("2026.3.4", False), ("2026.3.5", True), ("2026.3.6", True), ("2026.9.1", False)):
        monkeypatch.setattr(metadata, "version", lambda name, v=release: v if name == "rdkit" else version(name))
        problems = [text for topic, text in describe_machine() if topic == "problem"]
        assert [text.startswith(f"rdkit {release} is installed, but ") for text in problems] == [True] * is_excluded


def test_this_installation_has_no_problem() -> None:
    topics = dict(describe_machine())
    assert "problem" not in topics
    assert f"torch {metadata.version('torch')}" in topics["packages"]


def test_the_tested_releases_are_the_first_and_last_that_are_allowed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, releases in doctor._TESTED.items():
        found = re.search(rf'"{name}>=([\d.]+),<(\d+)\.(\d+)', project)
        assert found is not None
        assert (releases[0] + ".0").startswith(found[1] + ".")
        major, minor = map(int, releases[-1].split(".")[:2])
        assert (major, minor + 1) == (int(found[2]), int(found[3]))
        assert f"{name} {', '.join(releases)}" in dict(describe_machine())["tested with"]


def test_missing_programs_are_listed_with_what_needs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = list(describe_machine())
    assert ("programs", "sbatch") in lines
    assert ("missing", "mpirun, for cluster=mpi") in lines


def test_amx_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 amx_tile\n\nprocessor: 1\nflags: avx\n")
    monkeypatch.setattr(doctor, "amx_is_broken", lambda: True)
    text = doctor.describe_cpu(info)
    assert text.startswith("Some CPU, ")
    assert "AVX2, AMX that does not work (oneDNN does not use it); memory" in text


@pytest.mark.slow
def test_processes_of_a_launcher_test_their_connections() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "bionemo.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("packages ") == 1
    assert "torchrun" in done.stdout
    assert "all-reduce" in done.stdout


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert ("problem", "bionemo is not installed, so its requirements are unknown: pip install -e .") in [
        *describe_machine()
    ]
