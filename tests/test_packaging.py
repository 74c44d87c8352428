# SPDX-License-Identifier: Apache-2.0
"""The wheel works without a checkout, its base installation without extras, and locked requirements are complete."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bionemo.cli.doctor import _EXTRAS
from tests.conftest import ROOT
from tests.test_versions import PYTHONS, of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USER_EXTRAS = set(EXTRAS) - {"all", "docs", "dev"}
MODULES = {"molecules": "rdkit", "plots": "matplotlib", "wandb": "wandb", "analysis": "umap", "evaluate": "biotite",
           "report": "bokeh", "ray": "ray", "hub": "huggingface_hub", "store": "s3fs"}  # fmt: skip
WITHOUT = """
import sys

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {modules!r} else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        return self.finder.find_distributions(context) if hasattr(self.finder, "find_distributions") else []

sys.meta_path = [Finder(finder) for finder in sys.meta_path]
from bionemo.cli.main import main
main()
"""
RUN = ["pretrain", "--config-name=pretrain_esm2_mock", "model.num_layers=1", "model.hidden_size=32",
       "model.num_attention_heads=2", "model.micro_batch_size=4", "trainer.max_steps=2",
       "trainer.log_every_n_steps=1"]  # fmt: skip


def run_without(extras: set[str], directory: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command `bionemo` as if the packages of these extras were not installed."""
    code = WITHOUT.format(modules=[MODULES[extra] for extra in extras])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BIONEMO_HOME": str(directory)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=directory, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


PACKAGES = {"molecules": "rdkit", "wandb": "wandb", "report": "bokeh", "hub": "huggingface",
            "store": "(?:s3fs|gcsfs|adlfs)"}  # fmt: skip


def test_no_advice_installs_another_package() -> None:
    """The name bionemo belongs to another package on PyPI."""
    paths = [path for folder in ("bionemo", "docs", "examples", "scripts", "setup")
             for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh", ".ipynb", "")
             and path.is_file()]  # fmt: skip
    wrong = [path for path in paths if re.search(r"pip install '?bionemo(\[|'| |$)", path.read_text(), re.MULTILINE)]
    assert len(paths) > 300
    assert wrong == []


def test_names_of_extras() -> None:
    assert set(MODULES) == USER_EXTRAS == set(_EXTRAS)
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == USER_EXTRAS
    used = {name for path in (ROOT / "bionemo").rglob("*.py")
            for name in re.findall(r'optional_dependency\("(\w+)"|bionemo\[(\w+)\]', path.read_text())}  # fmt: skip
    assert {first or second for first, second in used} <= USER_EXTRAS | {"extra"}


@pytest.fixture(scope="module")
def smiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smiles") / "smiles.csv"
    path.write_text("zinc_id,smiles\n" + "".join(f"{i},{'C' * i}O\n" for i in range(1, 40)))
    return path


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("molecules", ["preprocess", "--config-name=zinc15", "source={smiles}", "output={out}"]),
        ("wandb", [*RUN, "exp_manager.create_wandb_logger=True"]),
        ("report", ["report", "{run}"]),
        ("hub", ["checkpoint", "inspect", "hf://lab/esm2"]),
        ("store", ["pretrain", "--config-name=pretrain_esm2_8M", "model.data.dataset_path=s3://bucket/data"]),
    ],
)
def test_command_without_its_extra(extra: str, arguments: list[str], smiles: Path, run: Path, tmp_path: Path) -> None:
    names = {"smiles": smiles, "out": tmp_path / "out", "run": run}
    done = run_without({extra}, tmp_path, *(each.format(**names) for each in arguments))
    assert done.returncode == 1, done.stdout
    message = rf"error: .* requires the extra '{extra}' of bionemo \(.*\): pip install ('{PACKAGES[extra]}[^']*' ?)+\n"
    *notes, error = done.stderr.splitlines(keepends=True)
    assert re.fullmatch(message, error), done.stderr
    assert all(note.startswith("note: ") for note in notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any extra."""
    directory = tmp_path_factory.mktemp("run")
    done = run_without(USER_EXTRAS, directory, *RUN, f"exp_manager.explicit_log_dir={directory / 'log'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: there is no loss_curve.png: a plot requires the extra 'plots'") == 1, done.stderr
    assert not list(directory.rglob("*.png"))
    return directory / "log"


def test_training_without_extras(run: Path) -> None:
    assert list(run.glob("checkpoints/*"))


def locked(name: str) -> Iterator[tuple[Requirement, str]]:
    """Yield each requirement of setup/requirements/NAME.txt with its hashes."""
    text = (ROOT / "setup" / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=")
        yield Requirement(requirement.strip()), "".join(hashes)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["base", "all", "dev"])
def test_locked_requirements(python: str, name: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
                   "platform_machine": "x86_64", "extra": ""}  # fmt: skip
    pins: dict[str, Requirement] = {}
    for pin, hashes in locked(name):
        assert re.fullmatch(r"sha256:[0-9a-f]{64}( +sha256:[0-9a-f]{64})* *", hashes), pin
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name not in pins
            pins[pin.name] = pin
    wanted, extras = list(map(Requirement, PROJECT["dependencies"])), [] if name == "base" else [name]
    for extra in extras:
        for each in map(Requirement, EXTRAS[extra]):
            if each.name == "bionemo":
                extras += each.extras
            else:
                wanted.append(each)
    for each in wanted:
        package = each.name.lower().replace("_", "-")
        if package != "torch" and (each.marker is None or each.marker.evaluate(environment)):
            (version,) = pins[package].specifier
            assert each.specifier.contains(version.version), pins[package]
    assert "torch" not in pins


def test_installed_packages_have_their_dependencies() -> None:
    """In the environment of setup/install.sh, which installs the locked requirements without looking for others."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", directory, ROOT], check=True)
    (path,) = directory.iterdir()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_wheel_in_an_empty_directory(python: str, wheel: Path, tmp_path: Path) -> None:
    """Install the wheel, without a checkout or extras, and train for 20 steps."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "BIONEMO_HOME")}  # fmt: skip
    subprocess.run([of(python), "-m", "venv", tmp_path / "venv"], env=environment, check=True)
    programs, empty = tmp_path / "venv" / "bin", tmp_path / "empty"
    install = [programs / "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, "torch==2.13.0"], env=environment, check=True)
    subprocess.run([*install, wheel], env=environment, check=True)
    empty.mkdir()
    command = [programs / "bionemo", "pretrain", "--config-name=pretrain_esm2_mock", "trainer.max_steps=20"]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 20 of 20" in done.stderr
