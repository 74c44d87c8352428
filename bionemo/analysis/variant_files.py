# SPDX-License-Identifier: Apache-2.0
"""Files of protein variants and their measured scores."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.analysis.files import is_fasta, read_fasta, read_nonempty_table
from bionemo.common.errors import UserError
from bionemo.data.table import Table, is_missing, parse_number
from bionemo.inference.outputs import Floats
from bionemo.inference.variants import AMINO_ACIDS, Mutation, NoSubstitutionError, index_of, parse_mutations

Scores = NDArray[np.float64]
_FASTA_COLUMNS = ["index", "name", "variant", "score"]


def read_variants(path: Path) -> tuple[Table, list[str] | None]:
    """Read a table of variants, and their sequences if it is a FASTA file.

    Headers of a FASTA file are `index|name_VARIANT|score`, as in `2810|beta-lactamase_R63P|0.873`. They become the
    columns `index`, `name`, `variant` and `score`.

    Raises:
        UserError: if the file cannot be read, or a header has another form.
    """
    if not is_fasta(path):
        return read_nonempty_table(path), None
    records = read_fasta(path)
    rows, locations = [], []
    for record in records:
        index, _, rest = record["id"].partition("|")
        label, _, score = rest.partition("|")
        name, mark, variant = label.rpartition("_")
        if not mark or not variant:
            raise UserError(f"{path}: record {record['id']!r}: expected a header such as >2810|name_R63P|0.873")
        rows.append([index, name, variant, score])
        locations.append(f"{path}: {record['id']}")
    return Table(path, _FASTA_COLUMNS, rows, locations), [record["sequence"] for record in records]


def parse_variants(table: Table, cells: Sequence[str]) -> list[list[Mutation] | None]:
    """Return the mutations of each variant, None for one that has anything else than substitutions.

    Raises:
        UserError: if a cell is empty or has another format, or no variant can be scored.
    """
    parsed: list[list[Mutation] | None] = []
    for cell, location in zip(cells, table.locations, strict=True):
        if is_missing(cell):
            raise UserError(f"{location}: the variant is missing: fill it in (wt is the wild type), or remove the row")
        try:
            parsed.append(parse_mutations(cell, location))
        except NoSubstitutionError:
            parsed.append(None)
    if not any(mutations is not None for mutations in parsed):
        raise UserError(f"{table.path}: no variant can be scored: give substitutions, such as A24G")
    return parsed


def describe_unusual(variants: Sequence[Sequence[Mutation] | None], locations: Sequence[str]) -> list[str]:
    """Return notes about variants that are not scored, and about substitutions by other letters than amino acids."""
    unscored = [location for mutations, location in zip(variants, locations, strict=True) if mutations is None]
    other = [
        (mutation.mutant, location)
        for mutations, location in zip(variants, locations, strict=True)
        for mutation in mutations or []
        if mutation.mutant not in AMINO_ACIDS and mutation.mutant != mutation.wild
    ]
    notes = []
    if unscored:
        kinds = "with a stop codon, deletion, insertion, frameshift or unknown effect"
        notes.append(f"not scored: {len(unscored):,} of {len(variants):,} variants, {kinds}, the first {unscored[0]}")
    if other:
        letters = ", ".join(f"{x!r} {count:,}" for x, count in Counter(x for x, _ in other).most_common())
        notes.append(
            "substitutions by other letters than the 20 amino acids (X, B, Z and J are ambiguous, U and O rare), "
            f"scored all the same: {letters} (the first {other[0][1]})"
        )
    return notes


def infer_wild_type(
    sequences: Sequence[str], variants: Sequence[str], locations: Sequence[str], offset: int = 0
) -> str:
    """Return the wild type: the first sequence with its mutations reverted. Check it against all other sequences.

    The first residue has the number 1 + offset. `locations` are the files and lines of the variants.

    Raises:
        UserError: if a variant contradicts the wild type; names the first one.
    """
    found = _mutate(sequences[0], variants[0], offset, locations[0], revert=True)
    for sequence, variant, location in zip(sequences, variants, locations, strict=True):
        if _mutate(found, variant, offset, location).upper() != sequence.upper():
            raise UserError(
                f"{location}: its sequence is not the wild type with {variant or 'no mutation'}, as inferred from the "
                "first record: correct one of the two, or give the wild type with --sequence"
            )
    return found


def _mutate(sequence: str, variant: str, offset: int, name: str, revert: bool = False) -> str:
    letters = list(sequence)
    for mutation in parse_mutations(variant, name):
        letters[index_of(mutation, sequence, offset, name)] = mutation.wild if revert else mutation.mutant
    return "".join(letters)


def parse_scores(table: Table, cells: Sequence[str], advice: str) -> Scores:
    """Return measured scores, fp64, nan for missing ones (see `is_missing`); `advice` ends the error message.

    Raises:
        UserError: if a cell is not a number; names its row.
    """
    values = [math.nan if is_missing(cell) else parse_number(cell) for cell in cells]
    if None in values:
        row = values.index(None)
        raise UserError(f"{table.locations[row]}: the score {cells[row]!r} is not a number: {advice}")
    return np.array(values, np.float64)


def rank_correlation(scores: Floats, measured: Scores) -> tuple[float, int]:
    """Return Spearman's rho between scores and measured scores (nan if undefined), and the number of pairs."""
    from scipy.stats import spearmanr

    known = ~np.isnan(measured)
    defined = len(set(scores[known])) > 1 and len(set(measured[known])) > 1
    return float(spearmanr(scores[known], measured[known]).statistic) if defined else math.nan, int(known.sum())
