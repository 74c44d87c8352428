# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out proteins: by length, family, and identity to the training data.

Shapes: N sequences, n residues of one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bionemo.analysis.files import read_fasta
from bionemo.common.errors import UserError
from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.letters import LetterCounts
from bionemo.data.proteins.masking import ResidueMasker
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.evaluation.html import format_mean
from bionemo.evaluation.similarity import MIN_IDENTITY, find_identities
from bionemo.evaluation.tasks import Problems, Result, Suite, Task, TaskResult
from bionemo.inference.batching import Ids, add_special_tokens, max_tokens
from bionemo.inference.long_sequences import apply_policy
from bionemo.inference.model import TrainedModel
from bionemo.inference.protein import masked_network, tokenize_protein
from bionemo.inference.windows import predict_residues

METHODS = {"masked": 100, "pseudo-perplexity": 16}
"""Sequences of a task by method."""
_TEST, _TRAIN = "test.fasta", "train.fasta"
_LENGTHS = (0, 128, 256, 512, 1024)
_IDENTITIES = (0.0, MIN_IDENTITY, 0.5, 0.9)
_IDENTITY_TASK = "identity"
_LETTERS = {
    "unknown_letters": "letters unknown to the model, each read as an unknown residue",
    "gaps": "gaps, read as gaps and not as residues (remove them from aligned sequences)",
}
_LISTED = 10  # names in a line
_SEED = 0  # of the masks

Record = Mapping[str, str]
Rows = list[dict[str, Any]]
"""For each sequence: `id`, `length`, `family`, the sum of its `loss` over its `targets`, and `identity` if known."""


@dataclass(frozen=True)
class LossTask(Task):
    """Loss of some sequences of a file."""

    path: Path
    first: int
    records: Sequence[Record] = field(repr=False)
    method: str

    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Compute the loss of each sequence, see `Task`."""
        masked_network(model)  # before the loop, which collects errors of single sequences
        known, proteins = [], []
        for number, record in enumerate(self.records, self.first + 1):
            with problems.collect():
                name = f"{self.path}, sequence {number} ({record['id']})"
                proteins.append(tokenize_protein(model, record["sequence"], name, any_length=True).ids)
                known.append(number - 1)
        counts = LetterCounts(model.network.vocabulary)
        counts.add([record["sequence"] for record in self.records])
        compute = _pseudo_losses if self.method == "pseudo-perplexity" else _masked_losses
        losses, targets = compute(model, proteins, known)
        rows = [
            {"number": number, "loss": float(loss), "targets": int(count)}
            for number, loss, count in zip(known, losses, targets, strict=True)
        ]
        metrics = {"loss": float(losses.sum() / targets.sum()) if rows else math.nan}
        return TaskResult(metrics, {"sequences": rows, "unknown_letters": counts.unknown, "gaps": counts.gaps})


def _masked_losses(
    model: TrainedModel, proteins: Sequence[Ids], numbers: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the summed loss at the target positions of each protein and their number, masked as in pretraining.

    A protein that is longer than the model is cut into parts of equal length.
    """
    network = masked_network(model)
    data = network.config.data
    masker = ResidueMasker(network.vocabulary, data.modify_percent, data.mask_percent, data.perturb_percent)
    cut = apply_policy(proteins, [], max_tokens(network), "split")
    key, masked, targets_of = purpose_key(_SEED, "evaluate"), [], []
    for part, (ids, owner) in enumerate(zip(cut.pieces, cut.owners, strict=True)):
        whole = add_special_tokens(network, ids)
        number_of_part = part - int(np.searchsorted(cut.owners, owner))
        keys = sample_keys(key, np.array([number_of_part]), np.array([numbers[owner]]))
        positions, true_ids = masker(whole, keys, np.array([len(whole)]))
        masked.append(whole[1:-1])
        targets_of.append((positions - 1, true_ids))
    losses, counts, part = np.zeros(len(proteins)), np.zeros(len(proteins), np.int64), 0
    for columns in model.compute(masked, ["logits"]):
        rest = columns["logits"].astype(np.float64)
        while len(rest):
            logits, rest = rest[: len(masked[part])], rest[len(masked[part]) :]
            positions, true_ids = targets_of[part]
            likelihoods = logits[positions] - np.logaddexp.reduce(logits[positions], axis=-1, keepdims=True)
            losses[cut.owners[part]] -= likelihoods[np.arange(len(positions)), true_ids].sum()
            counts[cut.owners[part]] += len(positions)
            part += 1
    return losses, counts


def _pseudo_losses(
    model: TrainedModel, proteins: Sequence[Ids], numbers: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the summed loss of each protein, each residue masked in turn, and its number of residues."""
    losses = np.zeros(len(proteins))
    for number, ids in enumerate(proteins):
        every = np.arange(len(ids))
        found = predict_residues(model, ids, every, True, "optimal")
        losses[number] = -found[every, ids].sum(dtype=np.float64)
    return losses, np.array([len(ids) for ids in proteins], np.int64)


@dataclass(frozen=True)
class IdentityTask(Task):
    """Identity of each sequence to the training data."""

    training: Path
    records: Sequence[Record] = field(repr=False)

    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Search the training data, see `Task`."""
        found = find_identities([record["sequence"] for record in self.records], self.training)
        unsearched = [self.records[number]["id"] for number in np.flatnonzero(np.isnan(found.values)).tolist()]
        details = {"tool": found.tool, "identities": found.values.tolist(), "not_searched": unsearched}
        return TaskResult({}, details)


@dataclass(frozen=True)
class Loss(Suite):
    """Loss on the proteins of a FASTA file, or of `test.fasta` in a folder.

    `family=NAME` in the header of a sequence is its family. If the folder contains `train.fasta`, the training data of
    the model, the results include the identity of the proteins to it.

    Attributes:
        method: `masked`: masks as in pretraining; `pseudo-perplexity`: each residue masked in turn.
    """

    name: ClassVar[str] = "loss"
    about: ClassVar[str] = (
        "Loss in nats per target residue, with its standard error over sequences (error): of all proteins, by length, "
        "by family, by identity to the training data, and without the proteins that have a relative of at least this "
        "identity there. Identity: the highest one of a local alignment that covers 80 % of the protein; below 20 "
        "residues, without gaps. Proteins with too few known residues are not searched."
    )
    method: str = "masked"

    @property
    def _path(self) -> Path:
        return self.data / _TEST if self.data.is_dir() else self.data

    def tasks(self) -> list[Task]:
        """Return a task for each group of sequences, and one that searches the training data; see `Suite`."""
        if self.method not in METHODS:
            raise UserError(f"method={self.method!r} is unknown: choose from {', '.join(METHODS)}")
        path, training, size = self._path, self.data / _TRAIN, METHODS[self.method]
        for name in (_TEST, _TRAIN):
            if not (self.data / name).exists():
                refuse_compressed(self.data / f"{name}.gz")
        records = read_fasta(path)
        found: list[Task] = []
        for first in range(0, len(records), size):
            part = records[first : first + size]
            settings = {"first": first, "count": len(part), "method": self.method}
            cost = sum(len(record["sequence"]) for record in part)
            found.append(LossTask(f"sequences-{first:07}", [path], settings, cost, path, first, part, self.method))
        if training.exists():
            found.append(IdentityTask(_IDENTITY_TASK, [path, training], {}, len(records), training, records))
        return found

    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return loss and perplexity of all sequences and of groups, see `Suite`."""
        records = read_fasta(self._path)
        losses = [each for each in results if "sequences" in each]
        rows = [row for each in losses for row in each["sequences"]]
        search = next((each for each in results if each["task"] == _IDENTITY_TASK), None)
        for row in rows:
            record = records[row["number"]]
            row |= {"length": len(record["sequence"]), "family": record.get("family")}
            row["identity"] = search["identities"][row["number"]] if search else None
        families = sorted({row["family"] for row in rows if row["family"] is not None})
        summary: dict[str, Any] = {
            "all": _statistics(rows),
            "lengths": _by_interval(rows, "length", _LENGTHS, str),
            "families": {name: _statistics([row for row in rows if row["family"] == name]) for name in families},
            "unknown_letters": _sum_counts(each["unknown_letters"] for each in losses),
            "gaps": _sum_counts(each.get("gaps", {}) for each in losses),
        }
        if search:
            searched = [row for row in rows if row["identity"] is not None]
            summary |= {
                "search": search["tool"],
                "not_searched": search["not_searched"],
                "identities": _by_interval(searched, "identity", _IDENTITIES, lambda value: f"{value:.0%}"),
                "without": {
                    f"{limit:.0%}": _statistics([row for row in searched if row["identity"] < limit])
                    for limit in _IDENTITIES[1:]
                },
            }
        return summary

    @staticmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return the loss of all sequences, and without relatives in the training data; see `Suite`."""
        whole = summary["all"]
        lines = [f"loss {_format(whole)}, perplexity {format_mean([whole['perplexity']])}"]
        for kind, note in _LETTERS.items():
            if letters := summary.get(kind):
                lines.append(f"{note}: {', '.join(f'{letter!r} {count:,}' for letter, count in letters.items())}")
        searched = sum(each["sequences"] for each in summary.get("identities", {}).values())
        for limit, found in summary.get("without", {}).items():
            count = searched - found["sequences"]
            lines.append(
                f"{count:,} of {whole['sequences']:,} sequences have a relative with at least {limit} identity in the "
                f"training data; loss without them {_format(found)}"
            )
        if names := summary.get("not_searched"):
            lines.append(f"not searched, because they have too few known residues: {_list_names(names)}")
        return lines


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _statistics(rows: Rows) -> dict[str, Any]:
    """Return the mean loss per target, its standard error over sequences, the perplexity, and counts."""
    losses, targets = (np.array([row[key] for row in rows], np.float64) for key in ("loss", "targets"))
    total = targets.sum()
    mean = float(losses.sum() / total) if total else math.nan
    count = len(rows)
    # error of a ratio of sums, by linearization
    squares = float(((losses - mean * targets) ** 2).sum())
    error = math.sqrt(squares * count / (count - 1)) / total if count > 1 and total else math.nan
    return {
        "loss": mean, "error": float(error), "perplexity": math.exp(min(mean, 700.0)), "sequences": count,
        "residues": sum(row["length"] for row in rows),
    }  # fmt: skip


def _by_interval(rows: Rows, key: str, edges: Sequence[float], label: Any) -> dict[str, dict[str, Any]]:
    """Return the statistics of the rows whose value is between two edges; intervals without rows are left out."""
    found = {}
    for low, high in zip(edges, [*edges[1:], math.inf], strict=True):
        if part := [row for row in rows if low <= row[key] < high]:
            name = f"below {label(high)}" if low == 0 else f"{label(low)} or more"
            found[name if low == 0 or high == math.inf else f"{label(low)} to {label(high)}"] = _statistics(part)
    return found


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _format(found: Mapping[str, Any]) -> str:
    return format_mean([found["loss"], found["error"]])
