# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron-Core are applied only while its process groups exist, and verified for each version."""

import hashlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core import jit
from megatron.core.tensor_parallel import layers

from bionemo.megatron import groups, patches

# of megatron-core 0.16.1, 0.17.0, 0.17.1, 0.18.0, 0.18.2, 0.19.0 and 0.19.2
SOURCES: dict[Any, str] = {
    jit: "0de81ea1c3a8fd5b",
    patches.layers: "1421fef5b4c69d10 7f809e9a7b5f34da fd9c4191a59d6b9a f559500986961544",
    patches.mappings: "4dbbe88b381dc92d fef6e03d38f36e72 a91d34138309d787",
    patches.param_and_grad_buffer: "e10c283edfcab3a6 ad0432d920bfe7d7 88a369c7e009175c 3fa532862dbf10bd "
    "065661bc10c66e57",
    patches.p2p_communication: "bd38e2a48dd3b1cf d34aff2655a452e3",
    patches.schedules: "e2bdb6f18cdd9201 872a1599791149e2 946a71d2fd69dfeb 9d3624f4b1bc8e9e",
    patches.utils: "1d4e52091aa975ce 2526ae2591495ba9 1e5db067bc135636 c4ed73957e283126",
}
UNCHANGED = """
import logging, sys, warnings
import torch, torch._dynamo  # which wraps torch.manual_seed

def state():
    return (
        {name: id(value) for name, value in vars(torch.cuda).items() if callable(value)},
        {name: id(value) for name, value in vars(torch).items() if callable(value)},
        list(warnings.filters), warnings.showwarning, logging.getLogger("megatron").level,
    )

before = state()
import bionemo, bionemo.inference, bionemo.megatron.groups, bionemo.models.esm2nv
from bionemo.megatron import patches
after = state()
names = ("torch.cuda", "torch", "warnings.filters", "warnings.showwarning", "logger")
for name, a, b in zip(names, before, after):
    if isinstance(a, dict):
        b = {key: b.get(key) for key in a}
    assert a == b, name
assert not patches._originals
"""


@pytest.mark.parametrize("owner", SOURCES, ids=lambda owner: owner.__name__)
def test_the_patched_source_is_the_one_that_was_verified(owner: Any) -> None:
    found = hashlib.sha256(inspect.getsource(owner).encode()).hexdigest()[:16]
    assert found in SOURCES[owner].split(), (
        f"{owner.__name__} has changed in megatron-core {megatron.core.__version__}: check that the patch in "
        f"bionemo/megatron/patches.py is still correct and complete, then add the checksum {found}"
    )


def test_importing_bionemo_changes_neither_torch_nor_warnings() -> None:
    subprocess.run([sys.executable, "-c", UNCHANGED], check=True)


IMPORT = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
compile_ = torch.compile
{}
print("wandb" in sys.modules, "torch._dynamo" in sys.modules, torch.compile is compile_)
import wandb
assert wandb.Settings
"""


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import bionemo.megatron", "False False True"),
        ("import wandb; import bionemo.megatron", "True False True"),  # it is blocked only if it is not loaded yet
        # If this fails, Megatron-Core no longer needs the patches in bionemo/megatron/__init__.py: remove them.
        (
            "import megatron.core.tensor_parallel, megatron.core.transformer.transformer_block",
            "True True True",
        ),
    ],
)
def test_importing_megatron_loads_neither_wandb_nor_the_compiler(statement: str, loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT.format(statement)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == loaded


@pytest.mark.parametrize(("backend", "patched"), [("gloo", True), ("fake", True), ("nccl", False)])
def test_backend_decides(monkeypatch: pytest.MonkeyPatch, backend: str, patched: bool) -> None:
    """A run on the CPU of a host with GPUs needs the patches, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(groups.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(groups.parallel_state, "initialize_model_parallel", lambda *_: None)
    try:
        groups.initialize(1, 1)
        assert (vars(layers)["torch"] is not torch) == patched
    finally:
        patches.undo()


def test_patches_are_undone() -> None:
    def patched() -> list[Any]:
        functions: list[Callable[..., Any]] = [
            vars(function)[name] for function in patches.AUTOGRAD_FUNCTIONS for name in ("forward", "backward")
        ]
        return [*(vars(module)["torch"] for module in patches.MODULES), *functions]

    before, current_device = patched(), torch.cuda.current_device
    patches.apply()
    patches.apply()  # a second time has no effect
    try:
        assert all(a is not b for a, b in zip(before, patched(), strict=True))
        namespace: Any = vars(layers)["torch"]
        assert namespace.cuda.current_device() == torch.device("cpu")
        assert namespace.zeros(2, device="cuda").device == torch.device("cpu")
        assert namespace.Tensor is torch.Tensor
        assert torch.cuda.current_device is current_device
    finally:
        patches.undo()
    assert all(a is b for a, b in zip(before, patched(), strict=True))


def test_patches_are_undone_if_the_groups_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no groups")

    monkeypatch.setattr(groups.parallel_state, "initialize_model_parallel", fail)
    with pytest.raises(RuntimeError, match="no groups"), groups.simulate(2, 1, 0):
        pass
    assert vars(layers)["torch"] is torch
