# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron-Core are applied only while its process groups exist."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from bionemo.megatron import groups, patches

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
        pytest.param(
            "import megatron.core.tensor_parallel, megatron.core.transformer.transformer_block",
            "True True True",
            marks=pytest.mark.slow,
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
