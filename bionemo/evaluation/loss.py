# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out proteins: by length, family, and identity to the training data.

Shapes: N sequences, n residues of one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.figures import new_figure, plain, to_svg
from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.letters import LetterCounts
from bionemo.data.proteins.masking import ResidueMasker
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.evaluation.html import format_number, html_table
from bionemo.evaluation.similarity import MIN_IDENTITY, PEPTIDE, find_identities
from bionemo.evaluation.tasks import Problems, Result, Suite, Task, TaskResult
from bionemo.inference.analysis.files import read_fasta
from bionemo.inference.analysis.protein import masked_network, tokenize_protein
from bionemo.inference.analysis.windows import predict_residues
from bionemo.inference.batching import Ids, add_special_tokens, max_tokens
from bionemo.inference.long_sequences import apply_policy
from bionemo.inference.model import TrainedModel
from bionemo.inference.progress import Advance

METHODS = {"masked": 1000, "pseudo-perplexity": 16}
"""Sequences of a task by method."""
_TEST, _TRAIN = "test.fasta", "train.fasta"
_LENGTHS = (0, 128, 256, 512, 1024)
_IDENTITIES = (0.0, MIN_IDENTITY, 0.5, 0.9)
_IDENTITY_TASK = "identity"
_MOST = 30  # families in the page
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

    @property
    def name(self) -> str:
        """Number of the first sequence."""
        return f"sequences-{self.first:07}"

    @property
    def files(self) -> list[Path]:
        """The file of the sequences."""
        return [self.path]

    @property
    def settings(self) -> dict[str, Any]:
        """Sequences and method."""
        return {"first": self.first, "count": len(self.records), "method": self.method}

    @property
    def cost(self) -> int:
        """Number of predicted residues."""
        return sum(len(record["sequence"]) for record in self.records)

    def run(self, model: TrainedModel, problems: Problems, advance: Advance) -> TaskResult:
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
        losses, targets = compute(model, proteins, known, advance)
        advance(self.cost - sum(map(len, proteins)))
        rows = [
            {"number": number, "loss": float(loss), "targets": int(count)}
            for number, loss, count in zip(known, losses, targets, strict=True)
        ]
        metrics = {"loss": float(losses.sum() / targets.sum()) if rows else math.nan}
        return TaskResult(metrics, {"sequences": rows, "unknown_letters": counts.unknown})


def _masked_losses(
    model: TrainedModel, proteins: Sequence[Ids], numbers: Sequence[int], advance: Advance
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
            advance(len(masked[part]))
            part += 1
    return losses, counts


def _pseudo_losses(
    model: TrainedModel, proteins: Sequence[Ids], numbers: Sequence[int], advance: Advance
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the summed loss of each protein, each residue masked in turn, and its number of residues."""
    losses = np.zeros(len(proteins))
    for number, ids in enumerate(proteins):
        every = np.arange(len(ids))
        found = predict_residues(model, ids, every, True, "optimal", advance)
        losses[number] = -found[every, ids].sum(dtype=np.float64)
    return losses, np.array([len(ids) for ids in proteins], np.int64)


@dataclass(frozen=True)
class IdentityTask(Task):
    """Identity of each sequence to the training data."""

    path: Path
    training: Path
    records: Sequence[Record] = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the task."""
        return _IDENTITY_TASK

    @property
    def files(self) -> list[Path]:
        """The sequences and the training data."""
        return [self.path, self.training]

    @property
    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    @property
    def cost(self) -> int:
        """Number of sequences."""
        return len(self.records)

    def run(self, model: TrainedModel, problems: Problems, advance: Advance) -> TaskResult:
        """Search the training data, see `Task`."""
        found = find_identities([record["sequence"] for record in self.records], self.training, advance)
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
    help: ClassVar[str] = "loss on held-out proteins"
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
        found: list[Task] = [
            LossTask(path, first, records[first : first + size], self.method) for first in range(0, len(records), size)
        ]
        if training.exists():
            found.append(IdentityTask(path, training, records))
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
            "unknown_letters": dict(sum((Counter(each["unknown_letters"]) for each in losses), Counter[str]())),
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
        lines = [f"loss {_format(whole)}, perplexity {format_number(whole['perplexity'])}"]
        if letters := summary["unknown_letters"]:
            listed = ", ".join(f"{letter!r} {count:,}" for letter, count in letters.items())
            lines.append(f"letters unknown to the model, each read as an unknown residue: {listed}")
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

    @staticmethod
    def render(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the tables and plots, see `Suite`."""
        summaries = {name: each["summary"] for name, each in sections.items()}
        rows = []
        for name, summary in summaries.items():
            whole = summary["all"]
            counts = (f"{whole[key]:,}" for key in ("sequences", "residues"))
            rows.append([name, _format(whole), format_number(whole["perplexity"]), *counts])
        parts = [
            "<p>Loss in nats per target residue, with its standard error over sequences.</p>",
            html_table(["model", "loss", "perplexity", "sequences", "residues"], rows),
            to_svg(_plot(sections)),
            "<h3>By length</h3>",
            _group_table(summaries, "lengths"),
        ]  # fmt: skip
        if any(each["families"] for each in summaries.values()):
            parts += ["<h3>By family</h3>", _group_table(summaries, "families")]
        if searched := {name: each for name, each in summaries.items() if "without" in each}:
            tools = ", ".join(dict.fromkeys(each["search"] for each in searched.values()))
            names = next(iter(searched.values()))["not_searched"]
            unsearched = escape(f" Not searched, with too few known residues: {_list_names(names)}.") if names else ""
            parts += [
                f"<h3>By identity to the training data</h3><p>Highest identity of a local alignment that covers 80 % "
                f"of the protein ({plain(tools)}); below {PEPTIDE} residues, without gaps.{unsearched}</p>",
                _group_table(searched, "identities"),
                "<p>Without the proteins that have a relative with at least this identity.</p>",
                _group_table(searched, "without"),
            ]
        return parts


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
    return format_number(found["loss"], found["error"])


def _group_table(summaries: Mapping[str, Mapping[str, Any]], key: str) -> str:
    """Return a table with a row for each group and a column for each model; of many groups, the largest."""
    sizes: dict[str, int] = {}
    for summary in summaries.values():
        for name, found in summary[key].items():
            sizes[name] = max(sizes.get(name, 0), found["sequences"])
    names = list(sizes)
    if len(names) > _MOST:
        names = sorted(names, key=lambda name: -sizes[name])[:_MOST]
    return html_table(
        ["group", "sequences", *summaries],
        ([name, f"{sizes[name]:,}",
          *(_format(each[key][name]) if name in each[key] else "" for each in summaries.values())] for name in names),
    )  # fmt: skip


def _plot(sections: Mapping[str, Mapping[str, Any]]) -> Any:
    """Plot the mean loss by length, and the distribution of the losses of sequences."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for name, section in sections.items():
        groups = section["summary"]["lengths"]
        left.errorbar(
            list(groups), [each["loss"] for each in groups.values()],
            [each["error"] or 0 for each in groups.values()], marker=".", label=plain(name),
        )  # fmt: skip
        losses = [
            row["loss"] / row["targets"]
            for result in section["results"] for row in result.get("sequences", []) if row["targets"]
        ]  # fmt: skip
        right.hist(losses, bins=40, histtype="step", label=plain(name))
    left.set(xlabel="residues", ylabel="loss (nats)", title="Length")
    left.tick_params(axis="x", labelrotation=20)
    right.set(xlabel="loss of a sequence (nats)", ylabel="sequences", title="Distribution")
    if len(sections) > 1:
        left.legend()
    return figure
