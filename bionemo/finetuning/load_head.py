# SPDX-License-Identifier: Apache-2.0
"""A head that was trained, read back from its file, and what it answers of new sequences."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.finetuning.heads import Head, SequenceHead, TokenHead
from bionemo.inference.model import TrainedModel


class TrainedHead(NamedTuple):
    """What a downstream run has left in `head.safetensors`.

    Attributes:
        head: that answers.
        classes: their names; none where it answers numbers.
        encoder: the model whose vectors it was trained on.
    """

    head: Head
    classes: tuple[str, ...]
    encoder: Path


def read_trained_head(path: Path) -> TrainedHead:
    """Read one; its form follows from its weights.

    Raises:
        UserError: when it is none.
    """
    try:
        require_regular(path)
        with safe_open(path, "pt") as file:
            told = json.loads((file.metadata() or {})["task"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        classes, encoder = tuple(map(str, told["classes"])), Path(str(told["encoder"]))
        head = _shaped(weights, max(len(classes), 1))
        head.load_state_dict(weights)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path} is no head of a downstream run ({str(error).splitlines()[0][:80]}): give RUN/head.safetensors"
        ) from error
    return TrainedHead(head.eval(), classes, encoder)


def _shaped(weights: dict[str, Tensor], answers: int) -> Head:
    """A head of the form of its weights."""
    if "first.weight" in weights:
        width, hidden_size, _ = weights["first.weight"].shape
        return TokenHead(hidden_size, answers, width)
    numbers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("layers.")})
    sizes = tuple(len(weights[f"layers.{number}.weight"]) for number in numbers[1:-1])
    return SequenceHead(len(weights["layers.0.weight"]), answers, sizes)


@torch.no_grad()
def answer(model: TrainedModel, trained: TrainedHead, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Answer for each sequence: a class for each residue, or a class and its probability, or a number and nothing.

    Raises:
        UserError: for a sequence that the model cannot read, or a model of another width than the head's.
    """
    head, device = trained.head.to(model.device), model.device
    first = "first.weight" if head.per_token else "layers.0.weight"
    width = head.state_dict()[first].shape[-2 if head.per_token else 0]
    if width != model.hidden_size:
        raise UserError(
            f"{model.path} gives vectors of {model.hidden_size}, and the head reads {width}: give {trained.encoder}"
        )
    if head.per_token:
        vectors = model.hiddens(texts)
        lengths = [len(each) for each in vectors]
        whole = torch.cat([torch.from_numpy(each) for each in vectors]).to(device)
        said = head(whole, lengths).argmax(1).split(lengths)
        return [("".join(trained.classes[number] for number in each.tolist()), "") for each in said]
    answers = head(torch.from_numpy(model.embed(texts)).to(device), [1] * len(texts))
    if not trained.classes:
        return [(f"{value:.7g}", "") for value in answers.squeeze(1).tolist()]
    best = answers.softmax(1).max(1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(trained.classes[number], f"{share:.4f}") for number, share in pairs]
