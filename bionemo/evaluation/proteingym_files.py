# SPDX-License-Identifier: Apache-2.0
"""Files of ProteinGym, as it distributes them, and its averages over assays.

Notin et al. 2023, "ProteinGym: Large-Scale Benchmarks for Protein Fitness Prediction and Design". The files are: a
reference file that describes the assays, one CSV file per assay, and a file of published results.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.analysis.variant_files import parse_scores
from bionemo.common.errors import UserError
from bionemo.data.table import Table, is_missing, read_table
from bionemo.evaluation.tasks import Problems, is_file_name
from bionemo.inference.variants import Mutation, index_of, parse_mutations

SETS = "DMS_substitutions", "DMS_indels", "clinical_substitutions", "clinical_indels"  # names of the reference files
_LEVEL = "DMS_substitutions_Spearman_DMS_level.csv"
PUBLISHED = (_LEVEL, "Spearman_per_assay.csv", f"benchmarks/DMS_zero_shot/substitutions/Spearman/{_LEVEL}")
_BENIGN = {"Benign": 1.0, "0": 1.0, "Pathogenic": 0.0, "1": 0.0}  # labels of clinical variants; higher is fitter
_BOOTSTRAP = 10_000  # resampled benchmarks
_PUBLISHED_COLUMNS = {"DMS ID", "Number of Mutants", "Selection Type", "UniProt ID", "MSA_Neff_L_category", "Taxon"}


@dataclass(frozen=True)
class Assay:
    """A row of the reference file."""

    name: str
    file: str
    uniprot: str
    taxon: str
    sequence: str  # wild type
    selection: str  # Activity, Binding, Expression, OrganismalFitness or Stability
    depth: str  # of the multiple sequence alignment: low, medium or high
    kind: str = SETS[0]


class Averages(NamedTuple):
    """Averages of a metric over assays."""

    overall: float  # mean over selection types
    error: float  # standard error of `overall`, by bootstrap over UniProt ids
    selection: dict[str, float]  # for each selection type: mean over UniProt ids of the mean over assays
    depth: dict[str, float]  # the same for each depth of the alignment
    taxon: dict[str, float]  # the same for each taxon


def find_file(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of several paths below a folder that exists."""
    return next((folder / name for name in names if (folder / name).exists()), None)


def read_reference(path: Path) -> list[Assay]:
    """Read the reference file of one of SETS, which is its name.

    Clinical proteins have no UniProt id, taxon, selection type or depth; each counts as an id of one selection type.

    Raises:
        UserError: if it cannot be read, a column is missing, an assay is listed twice, or a name is not a file name.
    """
    columns = (
        "DMS_id", "DMS_filename", "UniProt_ID", "taxon", "target_seq", "coarse_selection_type", "MSA_Neff_L_category",
    )  # fmt: skip
    is_clinical = path.stem.startswith("clinical")
    table = read_table(path)
    rows = _columns(table, ("DMS_id", "DMS_filename", "target_seq") if is_clinical else columns)
    if is_clinical:
        rows = [(name, file, name, "", sequence, path.stem, "") for name, file, sequence in rows]
    for row, location in zip(rows, table.locations, strict=True):
        for name in row[:2]:
            if not is_file_name(name):
                raise UserError(f"{location}: {name!r} is not a file name of letters, digits, '_', '-' and '.'")
    names = [row[0] for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} lists {twice[0]} twice: remove one of the two")
    kind = path.stem if path.stem in SETS else SETS[0]
    return [replace(Assay(*row), depth=row[-1].capitalize(), kind=kind) for row in rows]


def read_published(path: Path) -> tuple[list[Assay], dict[str, dict[str, float]]]:
    """Read published results: the assays, without sequences, and for each model its value for each assay.

    Raises:
        UserError: if the file cannot be read, or a column is missing.
    """
    table = read_table(path)
    rows = _columns(table, ("DMS ID", "UniProt ID", "Taxon", "Selection Type", "MSA_Neff_L_category"))
    assays = [Assay(name, "", uniprot, taxon, "", kind, depth) for name, uniprot, taxon, kind, depth in rows]
    models = [name for name in table.columns if name not in _PUBLISHED_COLUMNS]
    values = {model: parse_scores(table, table.column(model, ""), "leave the cell empty") for model in models}
    return assays, {
        model: {assay.name: float(x) for assay, x in zip(assays, column, strict=True) if not math.isnan(x)}
        for model, column in values.items()
    }


def _columns(table: Table, names: Iterable[str]) -> list[tuple[str, ...]]:
    columns = [table.column(name, "use the file as ProteinGym distributes it") for name in names]
    return list(zip(*columns, strict=True))


class Variants(NamedTuple):
    """Measured variants of an assay, N of them."""

    names: list[str]  # with indels, the whole sequences
    mutations: list[list[Mutation]]
    locations: list[str]  # file and line, for messages
    measured: NDArray[np.float64]  # [N]
    fit: NDArray[np.bool_]  # [N]
    missing: int  # number of rows without a measurement


def read_assay(path: Path, sequence: str, problems: Problems, kind: str = SETS[0]) -> Variants:
    """Read the variants of an assay file; rows without a measurement are counted and left out.

    Args:
        path: CSV file with the columns `mutant`, `DMS_score`, `DMS_score_bin` and, optionally, `mutated_sequence`.
            Files with indels have no `mutant`, clinical ones `DMS_bin_score` (Benign or Pathogenic, or 0 or 1), which
            is measured as 1 or 0.
        sequence: wild type.
        problems: receives each row that contradicts the wild type or another row.
        kind: one of SETS.

    Raises:
        UserError: if the file cannot be read, or a column is missing.
    """
    table = read_table(path)
    advice = "use the file as ProteinGym distributes it"
    is_indel, is_clinical = kind.endswith("indels"), kind.startswith("clinical")
    names = table.column("mutated_sequence" if is_indel else "mutant", advice)
    bins = table.column("DMS_bin_score" if "DMS_bin_score" in table.columns else "DMS_score_bin", advice)
    if is_clinical:
        bins = ["" if is_missing(cell) else str(_BENIGN.get(cell.strip().removesuffix(".0"), cell)) for cell in bins]
    cells = bins if is_clinical else table.column("DMS_score", advice)
    remedy = "set it to Benign or Pathogenic" if is_clinical else "correct it"
    measured = parse_scores(table, cells, f"{remedy}, or leave the cell empty")
    mutated = table.column("mutated_sequence", "") if "mutated_sequence" in table.columns else [""] * len(names)
    kept: list[int] = []
    parsed: list[list[Mutation]] = []
    first_row: dict[Any, int] = {}
    for row, (name, location) in enumerate(zip(names, table.locations, strict=True)):
        if math.isnan(measured[row]):
            continue
        with problems.collect():
            mutations = [] if is_indel else parse_mutations(name, location)
            if not is_indel:
                _check_variant(sequence, mutations, mutated[row], location)
            if is_missing(bins[row]):
                raise UserError(f"{location}: {name} has a DMS_score, but no DMS_score_bin: fill in both or none")
            earlier = first_row.setdefault(name if is_indel else tuple(sorted(mutations)), row)
            if measured[earlier] != measured[row]:
                raise UserError(
                    f"{location}: {name[:40]} has the score {measured[row]:g}, but {measured[earlier]:g} at "
                    f"{table.locations[earlier]}: remove one of the two"
                )
            if earlier == row:
                kept.append(row)
                parsed.append(mutations)
    return Variants(
        [names[row] for row in kept], parsed, [table.locations[row] for row in kept], measured[kept],
        np.array([bins[row].strip() in ("1", "1.0") for row in kept], bool), int(np.isnan(measured).sum()),
    )  # fmt: skip


def _check_variant(sequence: str, mutations: list[Mutation], mutated: str, location: str) -> None:
    """Raise a UserError if a variant contradicts the wild type or its own sequence."""
    letters = list(sequence)
    for mutation in mutations:
        index = index_of(mutation, sequence, 0, location)
        if sequence[index] != mutation.wild:
            raise UserError(
                f"{location}, {mutation}: residue {mutation.position} of the wild type is {sequence[index]}, not "
                f"{mutation.wild}: correct the row, or `target_seq` in the reference file"
            )
        letters[index] = mutation.mutant
    if mutated and mutated != "".join(letters):
        raise UserError(f"{location}: `mutated_sequence` is not the wild type with these mutations: correct the row")


def average_assays(values: Mapping[str, float], assays: Iterable[Assay], seed: int = 0) -> Averages:
    """Average a metric over assays as ProteinGym does.

    Assays of one UniProt id and selection type are averaged first, then ids, then selection types. The standard error
    is the standard deviation of 10,000 averages with ids drawn with replacement within each selection type.

    Args:
        values: value of each assay; missing assays and nan are left out.
        assays: rows of the reference file.
        seed: seed of the bootstrap.
    """
    used = [assay for assay in assays if not math.isnan(values.get(assay.name, math.nan))]
    by_selection = _means(used, values, lambda assay: assay.selection)
    random = np.random.default_rng(seed)
    samples = [
        means[random.integers(len(means), size=(_BOOTSTRAP, len(means)))].mean(1) for means in by_selection.values()
    ]
    selection = {kind: float(means.mean()) for kind, means in by_selection.items()}
    return Averages(
        float(np.mean(list(selection.values()))) if selection else math.nan,
        float(np.mean(samples, 0).std(ddof=1)) if samples else math.nan,
        selection,
        {kind: float(means.mean()) for kind, means in _means(used, values, lambda assay: assay.depth).items()},
        {kind: float(means.mean()) for kind, means in _means(used, values, lambda assay: assay.taxon).items()},
    )


def error_of_difference(values: Mapping[str, float], best: Mapping[str, float], assays: Iterable[Assay]) -> float:
    """Return the standard error that ProteinGym publishes: that of the difference to the best model.

    It is smaller than that of the average, because assays that are difficult for one model are so for another; it is 0
    for the best model. Arguments as in `average_assays`; `best` has the values of the best model.
    """
    return average_assays({name: value - best[name] for name, value in values.items()}, assays).error


def _means(assays: Iterable[Assay], values: Mapping[str, float], key: Any) -> dict[str, NDArray[np.float64]]:
    """Return for each category the mean over the assays of each UniProt id."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for assay in assays:
        groups[key(assay)][assay.uniprot].append(values[assay.name])
    return {
        category: np.array([np.mean(group) for group in ids.values()])
        for category, ids in sorted(groups.items())
        if category
    }
