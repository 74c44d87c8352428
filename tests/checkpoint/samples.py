# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for tests, written by one process or several."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from bionemo import checkpoint
from bionemo.checkpoint import Piece

FILES = ["index.json", "manifest.json", "state.json", "tensors-0.safetensors", "tensors-1.safetensors"]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return alike and torch.equal(bits(found), bits(expected))


def whole(name: str, values: Tensor) -> Piece:
    return Piece(name, tuple(values.shape), (0,) * values.ndim, values)


def weights(step: int) -> dict[str, Tensor]:
    """Return tensors with different values, and one different name, at every step."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"weights/matrix": (6, 5), "weights/bias": (7,), f"exp_avg/of step {step}": (3, 2, 2), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def state(step: int) -> dict[str, Any]:
    return {"global_step": step, "metrics": {"val_loss": 1 / step}, "note": f"step {step}"}


def save(path: Path, step: int, processes: int = 1) -> None:
    """Write the checkpoint of a step, with its tensors distributed over processes."""
    pieces = [whole(name, values) for name, values in weights(step).items()]
    together(path, state(step), [pieces[rank::processes] for rank in range(processes)])


def together(path: Path, state: dict[str, Any], pieces: list[Iterable[Piece]]) -> None:
    """Call `save_distributed` from threads instead of processes; raise the first error."""
    box: list[Any] = [None] * len(pieces)
    barrier = Barrier(len(pieces), timeout=600)

    def exchange(rank: int) -> Callable[[Any], list[Any]]:
        def with_all(value: Any) -> list[Any]:
            box[rank] = value
            barrier.wait()
            values = list(box)
            barrier.wait()
            return values

        return with_all

    with ThreadPoolExecutor(len(pieces)) as threads:
        done = [
            threads.submit(checkpoint.save_distributed, path, state, part, rank, exchange(rank))
            for rank, part in enumerate(pieces)
        ]
    failures = [future.exception() for future in done]
    assert len({failure is None for failure in failures}) == 1  # all or none fail
    if failures[0] is not None:
        assert len(set(map(str, failures))) == 1
        raise failures[0]


def holds(path: Path, step: int) -> bool:
    """Return whether a checkpoint is undamaged and bitwise equal to that of a step."""
    checkpoint.check(path)
    saved = checkpoint.Checkpoint(path)
    expected = weights(step)
    alike = saved.state == state(step) and saved.shapes().keys() == expected.keys()
    return alike and all(same_bits(saved.read(name), values) for name, values in expected.items())


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def newest(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from and the defects of those that were skipped."""
    messages: list[str] = []
    return checkpoint.find_newest(directory, lambda path, why: messages.append(f"{path.name}: {why}")), messages
