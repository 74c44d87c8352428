# SPDX-License-Identifier: Apache-2.0
"""Labels that do not count, because a residue is not resolved, count nowhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from bionemo.config.schema import SchedConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.features import Features
from bionemo.finetuning.heads import TokenHead
from bionemo.finetuning.task import NOT_ASKED, Columns, encode, read
from tests.finetuning.test_linear_probe import ADAM, CPU, RECIPE, tokens


def masked(path: Path, hidden: str) -> Features:
    """Sequences of a file, a third of whose residues are masked, with one letter for all labels of those."""
    rng = np.random.default_rng(0)
    rows = ["sequence,label,asked"]
    for length in rng.integers(3, 30, 40):
        labels, asked = rng.choice(list("HEC"), length), rng.random(length) < 2 / 3
        asked[0] = True
        rows.append(
            f"{'A' * length},{''.join(np.where(asked, labels, hidden))},{''.join(map(str, asked.astype(int)))}"
        )
    path.write_text("\n".join(rows))
    columns = Columns("token-level-classification", "sequence", "label", "asked")
    split = encode(read([path], columns), columns, ("C", "E", "H"))
    lengths = np.array([len(text) for text in split.texts])
    vectors = rng.standard_normal((int(lengths.sum()), 8)).astype(np.float32)
    return Features(vectors, np.concatenate(split.targets), lengths)


def learned(head: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}


def test_labels_that_are_masked_change_no_bit(tmp_path: Path) -> None:
    """Whatever stands there; a label that is asked of changes the weights."""
    one, other = masked(tmp_path / "one.csv", "C"), masked(tmp_path / "other.csv", "~")
    targets = one.targets.copy()
    targets[0] = (targets[0] + 1) % 3
    heads = [
        learned(linear_probe.train(lambda: TokenHead(8, 3), data, data, replace(RECIPE, epochs=2), CPU).head)
        for data in (one, other, replace(one, targets=targets))
    ]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not any(torch.equal(heads[0][name], heads[2][name]) for name in heads[0])


def test_tokens_that_are_not_asked_of_count_nowhere() -> None:
    """The loss is the mean over those that are: in training, of weights that stay, and in validation."""
    data, val = tokens(60, 0), tokens(20, 1)
    sched = SchedConfig(name="WarmupAnnealing", warmup_steps=0, min_lr=0.0)
    still = replace(RECIPE, epochs=1, optim=replace(ADAM, lr=0.0, sched=sched))
    one = linear_probe.train(lambda: TokenHead(8, 3, dropout=0.0), data, val, still, CPU)
    assert isinstance(one.head, TokenHead)
    for loss, of in ((one.history[0]["train_loss"], data), (one.history[0]["val_loss"], val)):
        assert loss == pytest.approx(cross_entropy(one.head, of), rel=1e-5)
    answers, targets = linear_probe.answers_of(one.head, val)
    assert len(answers) == (val.targets != NOT_ASKED).sum()
    assert not (targets == NOT_ASKED).any()
    nothing = Features(data.vectors, np.full_like(data.targets, NOT_ASKED), data.lengths)
    assert linear_probe.evaluate(one.head, nothing)["loss"] == 0.0


def cross_entropy(head: TokenHead, data: Features) -> float:
    """In nats, fp64, each sequence by itself, over the rows that are asked of alone."""
    first, second = head.first, head.second
    mean, scale = head.mean.numpy(), head.scale.numpy()
    losses: list[float] = []
    for end, length in zip(data.lengths.cumsum(), data.lengths, strict=True):
        rows = slice(end - length, end)
        inner = np.maximum(convolved((data.vectors[rows] - mean) * scale, first), 0.0)
        logits, targets = convolved(inner, second), data.targets[rows]
        losses += (special.logsumexp(row) - row[said] for row, said in zip(logits, targets, strict=True) if said >= 0)
    return float(np.mean(losses))


def convolved(rows: np.ndarray, layer: nn.Conv1d) -> np.ndarray:
    """Weight [out, in, 7] over zeros, the rows, and zeros."""
    padded = np.pad(rows.astype(np.float64), ((3, 3), (0, 0)))
    weight, bias = (each.detach().double().numpy() for each in layer.parameters())
    return np.stack([np.einsum("oik,ki->o", weight, padded[i : i + 7]) + bias for i in range(len(rows))])
