# SPDX-License-Identifier: Apache-2.0
"""A head trained on vectors that do not change: seconds where the whole model would take hours.

Shapes: R rows, C classes, or 1 for a number.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from bionemo.common.errors import UserError
from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.config.schema import OptimConfig
from bionemo.finetuning import metrics
from bionemo.finetuning.features import Batch, Features, batches
from bionemo.finetuning.heads import Head
from bionemo.finetuning.task import NOT_ASKED
from bionemo.megatron.finite import all_finite
from bionemo.training.schedules import build_schedule

_AT_ONCE = 256  # sequences of an evaluation


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Attributes:
        epochs: times that all sequences are seen.
        batch_size: sequences of an update.
        shuffle: see them in another order each time.
        seed: of weights, order and dropout.
        optim: the optimizer and its schedule.
        clip: largest norm of the gradient; None: any.
    """

    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    optim: OptimConfig
    clip: float | None = None


@dataclass
class Trained:
    """A head as it was best on the validation split, and how it came there.

    Attributes:
        head: the module.
        best: epoch from 1.
        history: for each epoch `train_loss` and the metrics of the validation split.
    """

    head: Head
    best: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def train(
    make_head: Callable[[], Head], data: Features, val: Features | None, recipe: Recipe, device: torch.device,
    told: Callable[[dict[str, float]], object] = lambda figures: None,
) -> Trained:  # fmt: skip
    """Train a new head, and keep it as it was when its validation loss was lowest; without validation, as it ended.

    Nothing outside draws other random numbers afterwards than it would have before.

    Args:
        make_head: draws its weights.
        data: what it learns from.
        val: what it is judged by.
        recipe: how.
        device: where.
        told: given the figures of each epoch.

    Raises:
        UserError: when a loss or the weights of the head are not finite.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(recipe.seed)
        head = make_head().to(device)
        head.standardise(data.vectors, data.targets)
        return _train(head, data, val, recipe, told)


def _train(
    head: Head, data: Features, val: Features | None, recipe: Recipe, told: Callable[[dict[str, float]], object]
) -> Trained:
    steps = recipe.epochs * math.ceil(len(data) / recipe.batch_size)
    optim = recipe.optim
    schedule = build_schedule(optim.sched, optim.lr, steps)
    kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    optimizer = kind(head.parameters(), optim.lr, (optim.betas[0], optim.betas[1]), optim.eps, optim.weight_decay)
    device = next(head.parameters()).device
    result, lowest, step = Trained(head), math.inf, 0
    kept = copy.deepcopy(head.state_dict())
    for epoch in range(1, recipe.epochs + 1):
        order = np.arange(len(data))
        if recipe.shuffle:
            order = np.random.default_rng([recipe.seed, epoch]).permutation(order)
        head.train()
        totals = torch.zeros(2, device=device)
        for batch in batches(data, recipe.batch_size, order):
            answers, targets = _answers(head, batch, device, _keys(recipe.seed, epoch, batch.sequences))
            loss, count = metrics.summed_loss(answers, targets), len(targets)
            optimizer.zero_grad()
            (loss / max(count, 1)).backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(head.parameters(), recipe.clip)
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            optimizer.step()
            step += 1
            totals += torch.stack((loss.detach(), loss.new_tensor(count)))
        figures = {"epoch": float(epoch), "train_loss": float(totals[0] / totals[1].clamp_min(1))}
        if val is not None:
            figures |= {f"val_{name}": value for name, value in evaluate(head, val).items()}
        _refuse_not_finite(head, epoch, figures["train_loss"], figures.get("val_loss", 0.0))
        result.history.append(figures)
        told(figures)
        if val is None or figures["val_loss"] < lowest:
            lowest, result.best = figures.get("val_loss", math.inf), epoch
            kept = copy.deepcopy(head.state_dict())
    head.load_state_dict(kept)
    return result


def _refuse_not_finite(head: Head, epoch: int, *losses: float) -> None:
    """See that the losses and the weights are finite numbers; the metrics may be undefined, as a correlation is."""
    wrong = [f"the loss is {value:.4g}" for value in losses if not math.isfinite(value)]
    if not all_finite(head.parameters()):
        wrong.append("the weights of the head are not finite")
    if wrong:
        raise UserError(f"epoch {epoch}: {wrong[0]}: lower the learning rate (optim.lr)")


def evaluate(head: Head, data: Features) -> dict[str, float]:
    """Mean loss and metrics."""
    return metrics.figures_of(*answers_of(head, data))


@torch.no_grad()
def answers_of(head: Head, data: Features) -> tuple[Tensor, Tensor]:
    """What a head says where it is asked, [R, C], and what it should say, [R]."""
    device = next(head.parameters()).device
    head.eval()
    pairs = [_answers(head, batch, device) for batch in batches(data, _AT_ONCE, np.arange(len(data)))]
    return torch.cat([answers for answers, _ in pairs]), torch.cat([targets for _, targets in pairs])


def _keys(seed: int, epoch: int, sequences: np.ndarray) -> Tensor:
    words = sample_keys(purpose_key(seed, "dropout"), np.full(len(sequences), epoch, np.int64), sequences)
    return torch.from_numpy(words.view(np.int64))


def _answers(head: Head, batch: Batch, device: torch.device, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    vectors, targets = (torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in batch[1:3])
    answers = head(vectors, batch.lengths.tolist(), None if keys is None else keys.to(device))
    if targets.dtype == torch.int64:
        where = targets != NOT_ASKED
        return answers[where], targets[where]
    return answers, targets
