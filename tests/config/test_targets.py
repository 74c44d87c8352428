# SPDX-License-Identifier: Apache-2.0
"""`_target_` imports allowed classes only; for other names no module is imported."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from bionemo.common.errors import UserError
from bionemo.config.targets import TARGETS, import_target, known_models
from tests.conftest import ROOT

PATHS = [
    "os.system", "posix.system", "builtins.eval", "builtins.exec", "subprocess.Popen", "logging.os.system",
    "torch.load", "antigravity.geohash", "this.s", "pty.spawn", "hostile.Class", "hostile.inner.Class",
    "collections.OrderedDict", "bionemo.models.language_model.os", "bionemo.models.language_model.load_model_class",
    "bionemo.models.esm1nv.nn.Module", "bionemo.models.esm1nv.ESM1nvConfig", "bionemo.models.esm1nv.F",
    "bionemo.models.esm1nv.MaskedLanguageModel", "bionemo.models.esm1nv.ESM1nv.__init__",
    "bionemo.models.esm1nv.ESM1nv.__init__.__globals__", "bionemo.models.esm1nv.__builtins__",
    "bionemo.models.esm2nv.torch.load", "bionemo.models.encoder.torch", "bionemo.config.targets.os.system",
    "bionemo.config.targets.importlib.import_module", "bionemo.formats.nemo_archive.read",
    "bionemo.preparation.sequences.shutil", "bionemo.preparation.download.fetch", "bionemo.common.errors.UserError",
    "bionemo.models", "bionemo", "", ".", "..", "a", ".ESM1nv", "bionemo.models.esm1nv.", "__main__.x", "sys.modules",
    "bionemo..models.esm1nv.ESM1nv", "bionemo.models.esm1nv.ESM1nv ", " bionemo.models.esm1nv.ESM1nv",
    "bionemo.models.esm1nv.ESM1nv\n", "bionemo.models.esm1nv.ESM1nv\0", "bionemo.models.esm1nv:ESM1nv",
    "bionemo/models/esm1nv/ESM1nv", "../hostile.Class", "bionemo.models.esm1nv.ESM1nv()", "x" * 10_000,
    "bionemo.models.esm1nv.\uff25\uff33\uff2d1nv",
]  # fmt: skip


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create importable packages; importing a forbidden one would write a file."""
    root, sentinel = tmp_path / "packages", tmp_path / "sentinel"
    harm = f"open({str(sentinel)!r}, 'w').close()\nclass Class:\n    pass\n"
    for name in ("hostile", "hostile/inner", "mylab_hostile", "shipped_hostile"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text(harm)
    (root / "mylab").mkdir()
    (root / "mylab" / "models.py").write_text(
        "import os\nfrom os import system\nfrom collections import OrderedDict\n"
        "class Mine:\n    class Inner: pass\nRenamed = Mine\nmade = Mine()\ndef function(): pass\n"
    )
    (root / "shipped-1.dist-info").mkdir()
    (root / "shipped-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped\nVersion: 1\n")
    (root / "shipped-1.dist-info" / "entry_points.txt").write_text("[bionemo.models]\nmine = mylab.models:Mine\n")
    monkeypatch.syspath_prepend(root)
    before = set(sys.modules)
    yield root
    assert not sentinel.exists()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("hostile", "mylab", "mylab_hostile", "shipped_hostile"):
            del sys.modules[name]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path[:40]))
def test_paths_that_are_not_allowed(path: str, packages: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(UserError) as caught:
        import_target(path)
    message = str(caught.value)
    assert message.startswith("cannot import")
    assert message.isprintable()
    assert len(message) < 300
    assert not {"antigravity", "this", "pty", "hostile", "bionemo.models.esm1nv"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    "name", ["system", "os", "os.system", "OrderedDict", "Renamed", "made", "function", "Mine.Inner", "no"]
)
def test_in_a_trusted_package_only_its_own_classes(name: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", " other, mylab ")
    assert import_target("mylab.models.Mine").__name__ == "Mine"
    with pytest.raises(UserError, match="mylab"):
        import_target(f"mylab.models.{name}")
    with pytest.raises(UserError, match="cannot import"):
        import_target("mylab_hostile.Class")
    assert "mylab_hostile" not in sys.modules


def test_entry_point_allows_one_class(packages: Path) -> None:
    assert import_target("mylab.models.Mine").__qualname__ == "Mine"
    with pytest.raises(UserError, match="cannot import"):
        import_target("mylab.models.Renamed")


def targets_in_yaml() -> list[str]:
    """Return every `_target_` of the configuration files."""
    texts = [path.read_text() for path in (ROOT / "conf").rglob("*.yaml")]
    return sorted({name for text in texts for name in re.findall(r"^_target_: (bionemo\S+)$", text, re.MULTILINE)})


def test_table_has_the_targets_of_the_configuration_files_and_their_dataclasses() -> None:
    assert set(targets_in_yaml()) == set(TARGETS)
    for target, dataclass in TARGETS.items():
        found = import_target(target)
        assert found.__name__ == target.rpartition(".")[2]
        hints = get_type_hints(found) if isinstance(found, type) else {"config": get_type_hints(found)["job"]}
        assert (hints.get("config") or get_type_hints(found.__init__)["config"]) is dataclass


def test_known_models_are_those_of_the_configuration_files_and_of_entry_points(packages: Path) -> None:
    configured = {name for name in targets_in_yaml() if name.startswith("bionemo.models.")}
    assert len(configured) == 7
    assert configured | {"mylab.models.Mine"} <= set(known_models())


def test_checking_a_configuration_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom bionemo.config.targets import target_schema\n"
        f"for target in {targets_in_yaml()}: target_schema(target, object)\n"
        "assert not {'torch', 'pyarrow', 'requests'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_empty_or_invalid_lists_trust_no_package(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", ",", " , ", ".", "*", "mylab.models.Mine.Inner", "my", "mylab.*"):
        monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", value)
        with pytest.raises(UserError):
            import_target("hostile.Class")
