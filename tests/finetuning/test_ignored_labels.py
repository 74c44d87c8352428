# SPDX-License-Identifier: Apache-2.0
"""Labels of unresolved residues do not affect training, validation or metrics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from bionemo.config.schema import SchedConfig
from bionemo.data.table import read_table
from bionemo.finetuning import linear_probe
from bionemo.finetuning.features import Features
from bionemo.finetuning.heads import TokenHead
from bionemo.finetuning.labels import IGNORED, TaskColumns, encode, read_examples
from tests.support.finetuning import ADAM, CPU, RECIPE, tokens


def masked(path: Path, hidden: str) -> Features:
    """Write sequences of which a third of the residues are masked, with the same letter as label of all of those."""
    rng = np.random.default_rng(0)
    rows = ["sequence,label,in_loss"]
    for length in rng.integers(3, 30, 40):
        labels, in_loss = rng.choice(list("HEC"), length), rng.random(length) < 2 / 3
        in_loss[0] = True
        rows.append(
            f"{'A' * length},{''.join(np.where(in_loss, labels, hidden))},{''.join(map(str, in_loss.astype(int)))}"
        )
    path.write_text("\n".join(rows))
    columns = TaskColumns("token-level-classification", "sequence", "label", "in_loss")
    split = encode(read_examples([read_table(path)], columns, []), columns, ("C", "E", "H"))
    lengths = np.array([len(text) for text in split.texts])
    vectors = rng.standard_normal((int(lengths.sum()), 8)).astype(np.float32)
    return Features(vectors, np.concatenate(split.targets), lengths)


def learned(head: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}


def test_masked_labels_do_not_change_the_result(tmp_path: Path) -> None:
    """Masked labels may have any value; a label that is not masked changes the weights."""
    one, other = masked(tmp_path / "one.csv", "C"), masked(tmp_path / "other.csv", "~")
    targets = one.targets.copy()
    targets[0] = (targets[0] + 1) % 3
    heads = [
        learned(linear_probe.train_head(lambda: TokenHead(8, 3), data, data, replace(RECIPE, epochs=2), CPU).head)
        for data in (one, other, replace(one, targets=targets))
    ]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not any(torch.equal(heads[0][name], heads[2][name]) for name in heads[0])


def test_losses_are_means_over_labelled_tokens() -> None:
    """This holds for fine-tuning, linear probes and validation."""
    data, val = tokens(60, 0), tokens(20, 1)
    sched = SchedConfig(name="WarmupAnnealing", warmup_steps=0, min_lr=0.0)
    still = replace(RECIPE, epochs=1, optim=replace(ADAM, lr=0.0, sched=sched))
    one = linear_probe.train_head(lambda: TokenHead(8, 3, dropout=0.0), data, val, still, CPU)
    assert isinstance(one.head, TokenHead)
    for loss, of in ((one.history[0]["train_loss"], data), (one.history[0]["val_loss"], val)):
        assert loss == pytest.approx(cross_entropy(one.head, of), rel=1e-5)
    predictions, targets = linear_probe.predict(one.head, val)
    assert len(predictions) == (val.targets != IGNORED).sum()
    assert not (targets == IGNORED).any()
    nothing = Features(data.vectors, np.full_like(data.targets, IGNORED), data.lengths)
    assert linear_probe.evaluate(one.head, nothing)["loss"] == 0.0


def cross_entropy(head: TokenHead, data: Features) -> float:
    """Compute the cross-entropy in nats in fp64, per sequence, over the labelled rows only."""
    first, second = head.first, head.second
    mean, scale = head.mean.numpy(), head.scale.numpy()
    losses: list[float] = []
    for end, length in zip(data.lengths.cumsum(), data.lengths, strict=True):
        rows = slice(end - length, end)
        inner = np.maximum(convolved((data.vectors[rows] - mean) * scale, first), 0.0)
        logits, targets = convolved(inner, second), data.targets[rows]
        losses += (
            special.logsumexp(row) - row[target] for row, target in zip(logits, targets, strict=True) if target >= 0
        )
    return float(np.mean(losses))


def convolved(rows: np.ndarray, layer: nn.Conv1d) -> np.ndarray:
    """Apply a weight [out, in, 7] to the zero-padded rows."""
    padded = np.pad(rows.astype(np.float64), ((3, 3), (0, 0)))
    weight, bias = (each.detach().double().numpy() for each in layer.parameters())
    return np.stack([np.einsum("oik,ki->o", weight, padded[i : i + 7]) + bias for i in range(len(rows))])
