# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a model's layers."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch

from bionemo.common.errors import HostError
from bionemo.models.trainable import Trainable


def is_compiled(option: bool | Literal["auto"], gpu: bool) -> bool:
    """Return whether to compile the layers.

    Args:
        option: `model.compile`; `auto` compiles on GPUs, if that is possible.
        gpu: whether the run uses a GPU.

    Raises:
        HostError: if `option` is True and this host cannot compile.
    """
    if option is False or (option == "auto" and not gpu):
        return False
    missing = None
    if gpu and find_spec("triton") is None:
        missing = "Triton"
    elif gpu and torch.cuda.get_device_capability() < (7, 0):
        missing = "a GPU of compute capability 7.0 or higher"
    elif not any(map(shutil.which, _compilers(gpu))):
        missing = f"a {'C' if gpu else 'C++'} compiler"
    if missing and option is True:
        raise HostError(
            f"model.compile=True needs {missing}, which was not found: install it, or set model.compile=False"
        )
    return missing is None


def _compilers(gpu: bool) -> list[str]:
    """Return the commands that torch tries: Triton compiles its launchers in C, torch.compile for CPUs uses C++."""
    variable, names = ("CC", ["gcc", "clang", "cc"]) if gpu else ("CXX", ["g++", "clang++"])
    chosen = os.environ.get(variable)
    return [chosen.split()[0]] if chosen and chosen.strip() else names


def compile_layers(model: Trainable) -> None:
    """Compile every layer at its first call; equal layers share a graph for training and one for evaluation.

    The graphs are valid for any number of tokens and of sequences. Call the layers within `shared_graphs`.
    """
    for block in model.blocks():
        for layer in block.layers:
            layer.compile(dynamic=True)


@contextmanager
def shared_graphs() -> Iterator[None]:
    """Let the layers share graphs although the numbers of their dropout sites and of their tokens differ.

    By default, the number of a dropout site is a constant of a graph, and numbers of tokens that are equal when it is
    compiled, such as those of encoder and decoder, must always be equal. Layers beyond the limit of 8 graphs would run
    without compilation.
    """
    import torch._dynamo  # imports the compiler, which takes seconds
    from torch.fx.experimental import _config as shapes

    options = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64)
    with options, shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
