# SPDX-License-Identifier: Apache-2.0
"""A run does not import packages of functions that it does not use; garbage collection is paused during imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLES, ROOT
from tests.support.runs import tiny

RUN = """
import gc, json, sys
UNUSED = {"matplotlib", "pandas", "scipy", "transformers", "wandb"}
at_plot = []

def watch(event, arguments):
    if event == "import" and arguments[0].startswith("matplotlib") and not at_plot:
        frame, callers = sys._getframe(), set()
        while frame:
            callers.add(frame.f_code.co_name)
            frame = frame.f_back
        at_plot[:] = "_plot" in callers, sorted(UNUSED & set(sys.modules))

def report(*values):
    print("report", *map(json.dumps, values))

sys.addaudithook(watch)
from bionemo.cli.pretrain import pretrain
from bionemo.config.compose import load
pretrain(load("pretrain_esm2_8M", sys.argv[2:], sys.argv[1]))
report(*at_plot, sorted(UNUSED & set(sys.modules)), gc.isenabled(), gc.get_freeze_count() > 100_000)

# see tests/support/nemo.py
from importlib import import_module
import_module("overrides.overrides").ensure_signature_is_compatible = lambda *_: None
import nemo.collections.common
from nemo.utils import exp_manager
import bionemo.experiment.nemo
report(bionemo.experiment.nemo.nemo is exp_manager, "transformers" in sys.modules)
report(nemo.collections.common.tokenizers.AutoTokenizer.__name__, "transformers" in sys.modules)
import nemo.utils.loggers.clearml_logger as clearml
report(clearml.pd.DataFrame({"a": [1]}).shape, clearml.pd.DataFrame is sys.modules["pandas"].DataFrame)
try:
    nemo.collections.common.absent
except AttributeError as error:
    report(str(error))
"""


def test_a_run_imports_only_what_it_uses(tmp_path: Path) -> None:
    """Matplotlib only when it draws the loss curve; NeMo's collection, which imports transformers, when it is used."""
    overrides = tiny(f"exp_manager.exp_dir={tmp_path / 'run'}", "trainer.max_steps=1", "trainer.val_check_interval=1")
    done = subprocess.run(
        [sys.executable, "-c", RUN, EXAMPLES / "esm2nv" / "conf", *overrides], capture_output=True, text=True,
        check=False, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("report ")] == [
        'report true [] ["matplotlib"] true true',
        "report true false",
        'report "AutoTokenizer" true',
        "report [1, 1] true",
        "report \"module 'nemo.collections.common' has no attribute 'absent'\"",
    ]


IMPORTS = """
def package_available(name):
    return name != "absent"

class RequirementCache:
    def __init__(self, requirement=None, module=None):
        self.met = requirement != "absent"

    def __bool__(self):
        return self.met
"""
TORCHMETRICS = """
import gc
from lightning_utilities.core.imports import RequirementCache, package_available

print("gc" if gc.isenabled() else "no gc", [name for name in NAMES if package_available(name)],
      [name for name in NAMES if RequirementCache(name)], bool(RequirementCache(module="numpy")))
"""
NAMES = ["scipy", "numpy", "matplotlib", "transformers", "absent", "matplotlib>=3", "numpy>=1"]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Write packages that replace Lightning and its dependencies."""
    for name in ("lightning", "torchmetrics", "lightning_utilities", "lightning_utilities/core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "lightning_utilities" / "core" / "imports.py").write_text(IMPORTS)
    (tmp_path / "torchmetrics" / "__init__.py").write_text(f"NAMES = {NAMES}\n{TORCHMETRICS}")
    return tmp_path


def execute(packages: Path, code: str) -> str:
    """Return the output of code in a process with these packages."""
    start = f"import gc, sys; sys.path[:0] = [{str(packages)!r}, {str(ROOT)!r}]\n"
    start += "from bionemo.experiment.quick_imports import quick_imports\nat_start = gc.get_freeze_count()\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True).stdout


AVAILABLE = "['numpy', 'matplotlib>=3', 'numpy>=1'] ['numpy', 'numpy>=1'] True"


def test_torchmetrics_is_imported_as_if_packages_were_absent(packages: Path) -> None:
    code = """
with quick_imports():
    print("torchmetrics" in sys.modules, gc.isenabled(), gc.get_freeze_count() - at_start)
    import lightning
from lightning_utilities.core import imports
print(gc.isenabled(), gc.get_freeze_count() > 1000)
print(imports.package_available("scipy"), type(imports.RequirementCache("scipy")).__name__)
"""
    assert execute(packages, code) == f"no gc {AVAILABLE}\nTrue False 0\nTrue True\nTrue RequirementCache\n"


def test_a_second_use_has_no_effect(packages: Path) -> None:
    code = """
with quick_imports():
    import lightning
    with quick_imports():
        pass
    print(gc.isenabled(), gc.get_freeze_count() - at_start)
frozen, more = gc.get_freeze_count(), [[] for _ in range(1000)]
with quick_imports():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() <= frozen)
"""
    assert execute(packages, code) == f"no gc {AVAILABLE}\nFalse 0\nTrue\nTrue True\n"


@pytest.mark.parametrize("broken", ["", "lightning_utilities", "torchmetrics"])
def test_garbage_collection_continues_after_an_error(packages: Path, broken: str) -> None:
    """An error inside, or in an import of quick_imports itself; with an unknown version of Lightning there is none."""
    if broken == "torchmetrics":
        (packages / broken / "__init__.py").write_text("raise ValueError('torchmetrics')")
    elif broken:
        (packages / broken / "core" / "imports.py").write_text("package_available = len")
    code = """
try:
    with quick_imports():
        print("inside", "torchmetrics" in sys.modules)
        raise ValueError("inside")
except ValueError as error:
    print(error, gc.isenabled())
"""
    expected = {
        "": f"no gc {AVAILABLE}\ninside True\ninside True\n",
        "lightning_utilities": "inside False\ninside True\n",
        "torchmetrics": "torchmetrics True\n",
    }
    assert execute(packages, code) == expected[broken]
