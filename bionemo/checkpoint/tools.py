# SPDX-License-Identifier: Apache-2.0
"""What can be done with checkpoints outside a run: look into them, and average their weights."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bionemo.checkpoint.manifest import check
from bionemo.checkpoint.reader import Checkpoint
from bionemo.checkpoint.source import Shape
from bionemo.checkpoint.state_schema import missing_to_resume
from bionemo.checkpoint.tensors import Piece
from bionemo.checkpoint.writer import save
from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree

WEIGHTS = "weights"
_KEPT = ("model", "config", "contact_head")  # what a checkpoint of weights alone knows of its model
_COUNTED = ("gpt2", "unnamed")  # vocabularies that give their number of tokens, others give the tokens


def describe(path: Path, every_tensor: bool = False) -> str:
    """Say in lines what a checkpoint holds.

    Raises:
        UserError: when it is damaged.
    """
    check(path)
    saved = Checkpoint(path)
    shapes = saved.shapes(WEIGHTS)
    slots = sorted({name.partition("/")[0] for name in saved.shapes()} - {WEIGHTS})
    files = Counter({name: size for name, size in saved.manifest["bytes"].items() if name.endswith(".safetensors")})
    model: dict[str, Any] = saved.state.get("model", {})
    lines = {
        "checkpoint": str(path),
        "step": f"{saved.manifest['step']:,}",
        "metrics": ", ".join(f"{name} {value:.4f}" for name, value in saved.manifest["metrics"].items()) or "none",
        "model": str(model.get("model._target_", "not said")),
        "parameters": parameters(shapes),
        "vocabulary": "not said" if (count := words(model)) is None else f"{count:,} tokens",
        "optimizer": ", ".join(slots) or "none: weights alone",
        "data": _position(saved.state.get("SequenceData", {}).get("position", {})),
        "files": f"{sum(files.values()) / 1e6:,.1f} MB of tensors in {len(files)} files",
    }
    return in_lines(lines, shapes if every_tensor else {})


def parameters(shapes: Mapping[str, Shape]) -> str:
    """How many there are."""
    return f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors"


def in_lines(said: Mapping[str, str], shapes: Mapping[str, Shape]) -> str:
    """What is said of a model, a line each, and its tensors below."""
    tensors = (f"  {name}  {' x '.join(map(str, shape))}" for name, shape in shapes.items())
    return "\n".join([*(f"{name:12} {value}" for name, value in said.items()), *tensors])


def words(model: dict[str, Any]) -> int | None:
    """Size of the vocabulary, by what a checkpoint says of its model; None when that says nothing."""
    match model.get("vocabulary", model.get("words")):
        case [str(kind), str(count), *_] if kind in _COUNTED and count.isdecimal():
            return int(count)
        case list(tokens):
            return len(tokens)
        case int(count):  # of weights that came from elsewhere
            return count
    return None


def _position(position: dict[str, int]) -> str:
    if missing_to_resume({"SequenceData": {"position": position}}, "SequenceData.position"):
        return "not said"
    samples, tokens = position["consumed_samples"], position["consumed_tokens"]
    return (
        f"{samples:,} samples and {tokens:,} tokens consumed; next: window {position['window']}, row {position['row']}"
    )


def average(output: Path, inputs: Sequence[Path]) -> None:
    """Write a checkpoint whose weights are the mean of those of others (Izmailov et al. 2018), summed in fp64.

    One tensor of one checkpoint is in memory at a time, and the means.

    Raises:
        UserError: when they are not of one model, or one is damaged or holds weights that are not finite.
    """
    if len(inputs) < 2:
        raise UserError("average needs two checkpoints at least")
    for path in inputs:
        check(path)
    saved = [Checkpoint(path) for path in inputs]
    first = saved[0]
    for other in saved[1:]:
        if other.shapes(WEIGHTS) != first.shapes(WEIGHTS) or not _alike(other, first):
            raise UserError(f"{other.path} and {first.path} are not of one model: their weights cannot be averaged")
    steps = max(checkpoint.manifest["step"] for checkpoint in saved)
    write_weights(output, first.state | {"global_step": steps}, _means(saved))


def _alike(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether what both know of their model is the same."""
    first, second = one.state.get("model", {}), other.state.get("model", {})
    return all(first[key] == second[key] for key in first.keys() & second.keys())


def _means(saved: list[Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    for name in saved[0].shapes(WEIGHTS):
        tensors = (_finite(checkpoint, name) for checkpoint in saved)
        total = next(tensors)
        dtype, total = total.dtype, total.double()
        for tensor in tensors:
            total += tensor
        yield name, (total / len(saved)).to(dtype)


def _finite(saved: Checkpoint, name: str) -> Tensor:
    tensor = saved.read(f"{WEIGHTS}/{name}")
    if not tensor.isfinite().all():
        raise UserError(f"{saved.path} holds NaN or infinite values in {name}: average the others without it")
    return tensor


def write_weights(output: Path, state: dict[str, Any], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write a checkpoint of weights alone, which a run can start from with `restore_from_path`.

    Raises:
        UserError: when there is something of that name, or it cannot be written.
    """
    if output.exists():
        raise UserError(f"{output} exists: name another output, or remove it")
    pieces = [Piece(f"{WEIGHTS}/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in weights]
    kept = {key: redact_tree(state[key]) if key == "config" else state[key] for key in _KEPT if key in state}
    save(output, {"global_step": state.get("global_step", 0), "optimizer_states": [], **kept}, pieces)


def weights_of(path: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, by their names in the model.

    Raises:
        UserError: when it is damaged.
    """
    check(path)
    saved = Checkpoint(path)
    return {name: saved.read(f"{WEIGHTS}/{name}") for name in saved.shapes(WEIGHTS)}
