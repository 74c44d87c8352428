# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: read from the source, nothing is imported."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "bionemo"
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in sorted(PACKAGE.rglob("*.py")) if "conf" not in path.relative_to(PACKAGE).parts[:1]}  # fmt: skip
ENTRY_POINTS = {name for name in FILES if name.count(".") == 1 and FILES[name].name != "__init__.py"} - {
    "bionemo.errors",
    "bionemo.version",
}


@cache
def imports(path: Path, types_too: bool = False) -> list[str]:
    """Modules that a file imports, at its top or inside functions; those for type checkers alone are left out."""
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
            for alias in node.names:  # a name may be a module of the package
                full = f"{node.module}.{alias.name}"
                found.append(full if full in FILES else node.module)
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importers(package: str) -> set[str]:
    return {name for name, path in FILES.items() if any(within(used, package) for used in imports(path))}


def test_the_walk_sees_imports_at_the_top_and_inside_functions() -> None:
    assert "bionemo.training.run" in set(imports(FILES["bionemo.pretrain"]))  # inside a function
    assert "megatron.core" in {used[:13] for used in imports(FILES["bionemo.megatron.step"])}
    assert len(FILES) > 50


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("megatron", ["bionemo.megatron"]),
        ("nemo", ["bionemo.interop"]),
        ("wandb", ["bionemo.interop"]),
        ("hydra", ["bionemo.config"]),
        ("omegaconf", ["bionemo.config", "bionemo.interop.nemo"]),
        ("pytorch_lightning", []),
        ("ray", ["bionemo.cluster.on_ray"]),
    ],
)
def test_one_door_to_each_framework(package: str, allowed: list[str]) -> None:
    strangers = {name for name in importers(package) if not any(within(name, door) for door in allowed)}
    if package == "hydra":
        strangers -= ENTRY_POINTS
    assert not strangers
    assert not allowed or importers(package)


KINDS = ["data.proteins", "data.molecules", "data.text"]


@pytest.mark.parametrize(
    ("part", "never"),
    [
        *((kind, [other for other in KINDS if other != kind]) for kind in KINDS),
        *((f"data.{part}", KINDS) for part in ("shards", "samples", "sampler", "packing", "collate", "module")),
        ("data", ["models", "training", "megatron", "interop"]),
        ("tokenizers", ["models", "training", "megatron", "interop", "data"]),
        ("config", ["data", "models", "training", "megatron", "interop", "tokenizers"]),
        ("models", ["training", "interop"]),
        ("megatron", ["models", "training", "interop"]),
        (
            "training",
            [
                *(f"models.{name}" for name in ("esm1nv", "esm1b", "esm2nv", "build")),
                "inference",
                "analysis",
                "downstream",
            ],
        ),
        ("inference", ["analysis", "downstream"]),
        ("downstream", ["analysis"]),
        ("cluster", ["data", "models", "training", "megatron", "interop", "tokenizers"]),
        ("launching", ["data", "models", "training", "megatron", "tokenizers"]),
        ("interop", ["data", "training"]),
        ("preparation", ["models", "training", "megatron", "interop", "tokenizers"]),
    ],
)
def test_imports_run_downward(part: str, never: list[str]) -> None:
    for name, path in FILES.items():
        if within(name, f"bionemo.{part}"):
            for used in imports(path):
                assert not any(within(used, f"bionemo.{other}") for other in never), f"{name} imports {used}"


def test_nothing_imports_an_entry_point() -> None:
    assert "bionemo.pretrain" in ENTRY_POINTS
    for name, path in FILES.items():
        assert not ENTRY_POINTS & set(imports(path)), name


def test_configuration_needs_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "lightning", "megatron", "nemo", "transformers", "wandb", "pandas")
    for name, path in FILES.items():
        if within(name, "bionemo.config") or name in ("bionemo", "bionemo.cluster", "bionemo.cluster.process"):
            assert not {used.split(".")[0] for used in imports(path, types_too=True)} & set(heavy), name


def test_preparation_needs_no_torch() -> None:
    needed, waiting = set(), ["bionemo.preprocess", "bionemo.preparation"]
    while waiting:
        name = waiting.pop()
        if name in FILES and name not in needed:
            needed.add(name)
            waiting += [*imports(FILES[name]), *(each for each in FILES if each.startswith("bionemo.preparation."))]
    assert "bionemo.preparation.shuffle" in needed
    for name in needed:
        assert not {used.split(".")[0] for used in imports(FILES[name])} & {
            "torch",
            "lightning",
            "megatron",
            "nemo",
        }, name


def test_packages_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in FILES.items():
        package = ".".join(name.split(".")[:2])
        used = {
            ".".join(used.split(".")[:2]) for used in imports(path) if within(used, "bionemo") and used != "bionemo"
        }
        graph.setdefault(package, set()).update(used - {package})
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"packages import each other: {' -> '.join(error.args[1])}")
    assert order.index("bionemo.config") < order.index("bionemo.data") < order.index("bionemo.training")
