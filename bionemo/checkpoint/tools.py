# SPDX-License-Identifier: Apache-2.0
"""Inspect and average checkpoints, and write checkpoints that contain only weights."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bionemo.checkpoint.manifest import check
from bionemo.checkpoint.reader import Checkpoint
from bionemo.checkpoint.source import WEIGHTS, Shape, TensorSource
from bionemo.checkpoint.tensors import Piece
from bionemo.checkpoint.writer import save
from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree

_MODEL_ENTRIES = ("model", "config", "contact_head", "base_model")  # state entries of checkpoints of weights only
_COUNTED = ("gpt2", "unnamed")  # vocabularies identified by their number of tokens; others by the tokens


def describe(path: Path, every_tensor: bool = False) -> str:
    """Return a text that describes a checkpoint.

    Raises:
        UserError: if it is damaged.
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
        "model": str(model.get("model._target_", "unknown")),
        "parameters": format_parameter_count(shapes),
        "vocabulary": "unknown" if (count := read_vocabulary_size(model)) is None else f"{count:,} tokens",
        "optimizer": ", ".join(slots) or "none: only weights",
        "data": _position(saved.state.get("SequenceData", {}).get("position", {})),
        "files": f"{sum(files.values()) / 1e6:,.1f} MB of tensors in {len(files)} files",
    }
    return format_description(lines, shapes if every_tensor else {})


def format_parameter_count(shapes: Mapping[str, Shape]) -> str:
    """Format the number of parameters and of tensors."""
    return f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors"


def format_description(facts: Mapping[str, str], shapes: Mapping[str, Shape]) -> str:
    """Format facts about a model, one per line, followed by its tensors."""
    tensors = (f"  {name}  {' x '.join(map(str, shape))}" for name, shape in shapes.items())
    return "\n".join([*(f"{name:12} {value}" for name, value in facts.items()), *tensors])


def read_vocabulary_size(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens from the `model` entry of a checkpoint's state; None if it has none."""
    match model.get("vocabulary", model.get("words")):
        case [str(name), str(count), *_] if name in _COUNTED and count.isdecimal():
            return int(count)
        case list(tokens):
            return len(tokens)
        case int(count):  # a converted model
            return count
    return None


def _position(position: dict[str, int]) -> str:
    if not position:
        return "unknown"
    samples, tokens = position["consumed_samples"], position["consumed_tokens"]
    row, start = position["row"], position["window_start"]
    return f"{samples:,} samples and {tokens:,} tokens consumed; next: row {row} of the window of sample {start:,}"


def average(output: Path, inputs: Sequence[Path]) -> None:
    """Write a checkpoint whose weights are the mean of other checkpoints (Izmailov et al. 2018), summed in fp64.

    Memory holds the means and one tensor of one checkpoint.

    Raises:
        UserError: if they are of different models, or one is damaged or has weights that are not finite.
    """
    if len(inputs) < 2:
        raise UserError("average needs at least two checkpoints")
    for path in inputs:
        check(path)
    saved = [Checkpoint(path) for path in inputs]
    first = saved[0]
    for other in saved[1:]:
        if other.shapes(WEIGHTS) != first.shapes(WEIGHTS) or not _same_model(other, first):
            raise UserError(
                f"{other.path} and {first.path} are checkpoints of different models: their weights cannot be averaged"
            )
    steps = max(checkpoint.manifest["step"] for checkpoint in saved)
    write_weights(output, first.state | {"global_step": steps}, _means(saved))


def _same_model(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether the entries that both checkpoints have about their model are equal."""
    first, second = one.state.get("model", {}), other.state.get("model", {})
    return all(first[key] == second[key] for key in first.keys() & second.keys())


def _means(saved: list[Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    for name in saved[0].shapes(WEIGHTS):
        tensors = (_read_finite(checkpoint, name) for checkpoint in saved)
        total = next(tensors)
        dtype, total = total.dtype, total.double()
        for tensor in tensors:
            total += tensor
        yield name, (total / len(saved)).to(dtype)


def _read_finite(saved: Checkpoint, name: str) -> Tensor:
    tensor = saved.read(f"{WEIGHTS}/{name}")
    if not tensor.isfinite().all():
        raise UserError(f"{saved.path} has NaN or infinite values in {name}: average the other checkpoints without it")
    return tensor


def write_weights(output: Path, state: dict[str, Any], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write a checkpoint that contains only weights, from which a run can start with `restore_from_path`.

    Raises:
        UserError: if the path exists or cannot be written.
    """
    if output.exists():
        raise UserError(f"{output} exists: choose another output, or remove it")
    pieces = [Piece.whole(f"{WEIGHTS}/{name}", tensor) for name, tensor in weights]
    kept = {key: redact_tree(state[key]) if key == "config" else state[key] for key in _MODEL_ENTRIES if key in state}
    save(output, {"global_step": state.get("global_step", 0), "optimizer_states": [], **kept}, pieces)


def iterate_weights(source: TensorSource) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of each weight."""
    return ((name, source.read(f"{WEIGHTS}/{name}")) for name in source.shapes(WEIGHTS))
