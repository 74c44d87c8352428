# SPDX-License-Identifier: Apache-2.0
"""Contacts between residues: precision of the most likely pairs, compared with structures.

Rao et al. 2020, "Transformer protein language models are unsupervised structure learners", section 4.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bionemo.analysis.contacts import fit_contact_head, precision
from bionemo.analysis.files import read_fasta
from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.evaluation.html import format_mean
from bionemo.evaluation.structure_files import strip_suffix
from bionemo.evaluation.structures import Chain, read_chain
from bionemo.evaluation.tasks import LeftOut, Problems, Result, Suite, Task, TaskResult, is_file_name
from bionemo.formats.huggingface.contacts import ContactHead
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.model import TrainedModel

RANGES: dict[str, tuple[int, int | None]] = {"long": (24, None), "medium": (12, 24), "short": (6, 12)}
"""Separations |i - j| of the pairs: from the first number to below the second."""
_DIVISORS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}
METRICS = [f"{name} {label}" for name in RANGES for label in _DIVISORS]
_FIT, _SEQUENCES = "fit", "sequences.fasta"
# a PDB id of 4 or 12 characters and a chain; suffixes of PDB-REDO and PDBe, such as `final`, are longer
_CHAIN = re.compile(r"(?:\d\w{3}|pdb\d\w{3}|pdb_\w{8})_(\w{1,4})", re.ASCII | re.IGNORECASE)
_LISTED = 10  # structures in a line
_BYTES = 640  # of a structure file for each residue, about


@dataclass(eq=False)
class _FittedHead:
    """A contact head for models without one, fitted once in each process.

    Attributes:
        files: structures to which it is fitted.
    """

    files: Sequence[Path]
    _head: ContactHead | None = field(default=None, init=False)

    def get(self, model: TrainedModel) -> ContactHead:
        """Return the head of the model, or fit one."""
        if (own := model.contact_head) is not None and any(own["weight"]):  # zeros are written instead of no head
            return own
        if self._head is None:
            if not self.files:
                raise UserError(
                    f"{model.path} has no contact head: put about 20 structures, to which one is fitted, into a "
                    f"folder {_FIT!r} in the data directory"
                )
            try:
                chains = [_read(path) for path in self.files]
            except LeftOut as reason:
                raise UserError(f"{reason}: remove it") from reason
            maps = [chain.contacts() for chain in chains]
            self._head = fit_contact_head(model, [chain.sequence for chain in chains], maps)
        return self._head


@dataclass(frozen=True)
class StructureTask(Task):
    """Contacts of a chain."""

    path: Path
    sequence: str | None
    head: _FittedHead

    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Predict the contacts, see `Task`."""
        head = self.head.get(model)
        chain = _read(self.path, self.sequence)
        predicted, known = predict_contacts(model, chain.sequence, head, str(self.path)), chain.contacts()
        values = {
            f"{name} {label}": precision(predicted, known, divisor, *limits)
            for name, limits in RANGES.items()
            for label, divisor in _DIVISORS.items()
        }
        details = {"length": len(chain.sequence), "observed": chain.observed, "gaps": chain.gaps}
        return TaskResult(values, {"chain": chain.name, **details})


def _chain_of(path: Path) -> str | None:
    """Return the chain that the name of a file names."""
    found = _CHAIN.fullmatch(strip_suffix(path) or "")
    return found[1] if found else None


def _read(path: Path, sequence: str | None = None) -> Chain:
    """Read the chain of a task.

    Raises:
        LeftOut: if it has no C-beta atoms.
        UserError: as in `read_chain`.
    """
    chain = read_chain(path, _chain_of(path), sequence)
    if not chain.has_side_chains:
        raise LeftOut(f"{path} has no C-beta atoms (a C-alpha trace or a backbone)")
    return chain


@dataclass(frozen=True)
class Contacts(Suite):
    """All structures in `data`: `NAME.cif`, `.mmcif`, `.bcif`, `.pdb` or `.ent`, which may be compressed with gzip.

    The chain is the first protein, or X in a file named like `1abc_X.cif`. `sequences.fasta` may contain the full
    sequence of a chain, with the name of its file. C-alpha traces are left out. For a model without a contact head,
    one is fitted to the structures in `data/fit`.
    """

    name: ClassVar[str] = "contacts"
    about: ClassVar[str] = (
        "Precision of the L, L/2 and L/5 most likely pairs of a chain of L residues: the share with C-beta atoms less "
        "than 8 Å apart. Mean over chains, with its standard error (error). Long range: |i-j| of at least 24; medium: "
        "12 to 23; short: 6 to 11. Chains with gaps have no sequence, and |i-j| is too small there."
    )

    def tasks(self) -> list[StructureTask]:
        """Return a task for each structure, see `Suite`."""
        paths, fasta = _find_structures(self.data), self.data / _SEQUENCES
        if not paths:
            raise UserError(
                f"{self.data} has no structures: put files *.cif, *.mmcif, *.pdb, *.ent there (or *.bcif; also *.gz)"
            )
        known = {*paths, fasta, self.data / _FIT}
        if others := sorted(path.name for path in self.data.iterdir() if path not in known):
            notify(
                f"{self.data}: files that are no structures are left out ({len(others):,}): {', '.join(others[:5])}"
            )
        names = [strip_suffix(path) or "" for path in paths]
        for path, name in zip(paths, names, strict=True):
            if not is_file_name(name):
                raise UserError(f"{path}: its name is not a file name of letters, digits, '_', '-' and '.'")
            if names.count(name) > 1:
                raise UserError(f"{self.data} has several structures named {name}: remove all but one")
        if not fasta.exists():
            refuse_compressed(fasta.with_name(f"{_SEQUENCES}.gz"))
        sequences: dict[str, str] = {}
        for record in read_fasta(fasta) if fasta.exists() else []:
            if (name := record["id"]) not in names:
                raise UserError(f"{fasta}: there is no structure named {name}: rename or remove it")
            if name in sequences:
                raise UserError(f"{fasta} has several sequences named {name}: remove all but one")
            sequences[name] = record["sequence"]
        head = _FittedHead(_find_structures(self.data / _FIT))
        return [
            StructureTask(
                name=name,
                files=[path, *head.files],
                settings={"sequence": sequences.get(name)},
                cost=1 + path.stat().st_size // _BYTES,
                path=path,
                sequence=sequences.get(name),
                head=head,
            )
            for path, name in zip(paths, names, strict=True)
        ]

    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return mean, standard error and number of structures of each metric, see `Suite`."""
        summary = {}
        for metric in METRICS:
            known = [value for each in results if not math.isnan(value := _value(each, metric))]
            mean = sum(known) / len(known) if known else math.nan
            squares = sum((value - mean) ** 2 for value in known)
            error = math.sqrt(squares / (len(known) - 1) / len(known)) if len(known) > 1 else math.nan
            summary[metric] = {"mean": mean, "error": error, "structures": len(known)}
        return summary | {"gaps": [each["task"] for each in results if each["gaps"]]}

    @staticmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return a line for each metric, see `Suite`."""
        known = {metric: summary[metric] for metric in METRICS if summary[metric]["mean"] is not None}
        lines = [f"{metric:12}  {format_mean([found['mean'], found['error']])}" for metric, found in known.items()]
        if names := summary["gaps"]:
            lines.append(
                f"structures with gaps but no sequence, which make |i-j| too small ({len(names):,}): "
                f"{', '.join(names[:_LISTED])}{', ...' * (len(names) > _LISTED)}: give the sequences in {_SEQUENCES}"
            )
        return lines


def _find_structures(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_file() and strip_suffix(path) is not None)


def _value(result: Result, metric: str) -> float:
    value = result["metrics"][metric]
    return math.nan if value is None else float(value)
