# SPDX-License-Identifier: Apache-2.0
"""Imports between packages, parsed from the source without importing anything."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "bionemo"
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in sorted(PACKAGE.rglob("*.py")) if "conf" not in path.relative_to(PACKAGE).parts[:1]}  # fmt: skip
CORE = (  # a package may import only packages of lower levels
    {"common"},
    {"checkpoint", "config", "tokenizers"},
    {"data", "experiment", "formats", "launch"},
    {"megatron"},
    {"models"},
    {"inference", "training"},
)
PLUG_INS = (  # may import the core, which never imports them
    {"analysis", "planning", "preparation"},
    {"finetuning"},
    {"evaluation"},
)
LEVELS = (*CORE, *PLUG_INS, {"cli"})  # `cli`, level 7 of the core, loads core and plug-ins
LEVEL = {package: number for number, packages in enumerate(LEVELS, 1) for package in packages}
ALIASES = {  # `python -m bionemo.NAME` and `python -m bionemo.model.infer`
    "cluster", "finetune", "model", "predict", "preprocess", "pretrain",
}  # fmt: skip


@cache
def imports(path: Path, types_too: bool = False) -> list[str]:
    """Yield the modules that a file imports, also inside functions, except for type checking only."""
    tree = ast.parse(path.read_text())
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    found: list[str] = []
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped and not types_too:
            continue
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:  # a name may be a submodule
                full = f"{node.module}.{alias.name}"
                found.append(full if full in FILES else node.module)
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importers(package: str) -> set[str]:
    return {name for name, path in FILES.items() if any(within(used, package) for used in imports(path))}


def test_imports_at_module_level_and_inside_functions_are_found() -> None:
    assert "bionemo.training.train" in set(imports(FILES["bionemo.cli.pretrain"]))  # inside a function
    assert "megatron.core" in {used[:13] for used in imports(FILES["bionemo.megatron.train_step"])}
    assert len(FILES) > 50


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("megatron", ["bionemo.megatron", "bionemo.preparation.megatron_corpus"]),
        ("nemo", ["bionemo.experiment"]),
        ("wandb", ["bionemo.experiment"]),
        ("hydra", ["bionemo.config"]),
        ("omegaconf", ["bionemo.config", "bionemo.experiment.nemo"]),
        ("pytorch_lightning", []),
        ("ray", ["bionemo.launch.ray_workers", "bionemo.preparation.ray_pool"]),
    ],
)
def test_frameworks_are_imported_only_by_their_packages(package: str, allowed: list[str]) -> None:
    strangers = {name for name in importers(package) if not any(within(name, door) for door in allowed)}
    assert not strangers
    assert not allowed or importers(package)


KINDS = ["data.proteins", "data.molecules", "data.text"]


@pytest.mark.parametrize(
    ("part", "never"),
    [
        *((kind, [other for other in KINDS if other != kind]) for kind in KINDS),
        *(
            (f"data.{part}", KINDS)
            for part in ("shards", "dataset", "sampler", "packing", "collate", "loader", "data_module")
        ),
    ],
)
def test_data_packages_are_independent(part: str, never: list[str]) -> None:
    for name, path in FILES.items():
        if within(name, f"bionemo.{part}"):
            for used in imports(path):
                assert not any(within(used, f"bionemo.{other}") for other in never), f"{name} imports {used}"


def test_a_package_imports_only_packages_of_lower_levels() -> None:
    wrong = []
    for name, path in FILES.items():
        package = [*name.split("."), ""][1]
        if package in ALIASES or name == "bionemo" or name.endswith(".__main__"):
            continue
        for used in imports(path):
            target = [*used.split("."), ""][1]
            ours = used.split(".")[0] == "bionemo" and target not in ("", "__version__", package)
            if ours and LEVEL.get(target, 99) >= LEVEL[package]:
                wrong.append(f"{name} imports {used}")
    assert not wrong


def test_the_levels_name_every_package() -> None:
    found = {name.split(".")[1] for name in FILES if "." in name}
    assert found == set(LEVEL) | ALIASES
    assert len(CORE) <= 6 and len(LEVELS) <= 10


def test_configuration_imports_no_heavy_packages() -> None:
    heavy = ("torch", "numpy", "lightning", "megatron", "nemo", "transformers", "wandb", "pandas")
    for name, path in FILES.items():
        if within(name, "bionemo.config") or name in (
            "bionemo",
            "bionemo.common.launcher_environment",
        ):
            assert not {used.split(".")[0] for used in imports(path, types_too=True)} & set(heavy), name


def test_preparation_does_not_import_torch() -> None:
    corpus = "bionemo.preparation.megatron_corpus"  # Megatron's own format; imported for text only
    needed, waiting = set(), ["bionemo.cli.preprocess", "bionemo.preparation"]
    while waiting:
        name = waiting.pop()
        if name in FILES and name not in needed:
            needed.add(name)
            waiting += [
                *imports(FILES[name]),
                *(each for each in FILES if each.startswith("bionemo.preparation.") and each != corpus),
            ]
    assert "bionemo.preparation.name_index" in needed
    for name in needed:
        assert not {used.split(".")[0] for used in imports(FILES[name])} & {
            "torch",
            "lightning",
            "megatron",
            "nemo",
        }, name
