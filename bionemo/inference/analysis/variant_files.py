# SPDX-License-Identifier: Apache-2.0
"""Variants of a protein in files, and what was measured of them."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.table import Table
from bionemo.inference.analysis.files import is_fasta, read_fasta, read_filled
from bionemo.inference.analysis.variants import mutations, place_of
from bionemo.inference.outputs import Floats

Measured = NDArray[np.float64]
_FASTA_COLUMNS = ["index", "name", "variant", "score"]
_NOT_MEASURED = ("", "na", "nan")


def read_variants(path: Path) -> tuple[Table, list[str] | None]:
    """Read a table of variants, and their sequences where it is a FASTA file.

    Headers of a FASTA file are `index|name_VARIANT|score`, as in `2810|beta-lactamase_R63P|0.873`; they become the
    columns `index`, `name`, `variant` and `score`.

    Raises:
        UserError: when the file cannot be read, or a header is another.
    """
    if not is_fasta(path):
        return read_filled(path), None
    records = read_fasta(path)
    rows, places = [], []
    for record in records:
        index, _, rest = record["id"].partition("|")
        called, _, score = rest.partition("|")
        name, mark, variant = called.rpartition("_")
        if not mark or not variant:
            raise UserError(f"{path}: record {record['id']!r}: expected a header such as >2810|name_R63P|0.873")
        rows.append([index, name, variant, score])
        places.append(f"{path}: {record['id']}")
    return Table(path, _FASTA_COLUMNS, rows, places), [record["sequence"] for record in records]


def wild_type(sequences: Sequence[str], variants: Sequence[str], places: Sequence[str], offset: int = 0) -> str:
    """Find what all variants are of: the first with its mutations undone, which all others must agree with.

    Args:
        sequences: of the variants.
        variants: their mutations.
        places: where they stand, for messages.
        offset: added to positions.

    Raises:
        UserError: naming the variant that does not agree.
    """
    found = _changed(sequences[0], variants[0], offset, places[0], undo=True)
    for sequence, variant, place in zip(sequences, variants, places, strict=True):
        if _changed(found, variant, offset, place) != sequence:
            raise UserError(
                f"{place}: its sequence is not the wild type with {variant or 'no mutation'}, as the first record has "
                "it: mend one of the two, or give the wild type with --sequence"
            )
    return found


def _changed(sequence: str, variant: str, offset: int, name: str, undo: bool = False) -> str:
    letters = list(sequence)
    for each in mutations(variant, name):
        letters[place_of(each, sequence, offset, name)] = each.wild if undo else each.mutant
    return "".join(letters)


def measured(table: Table, cells: Sequence[str]) -> Measured:
    """Numbers that were measured, fp64, nan where a cell is empty, `NA` or `nan`.

    Raises:
        UserError: naming the row of one that is no number.
    """
    values = []
    for cell, place in zip(cells, table.places, strict=True):
        try:
            values.append(math.nan if cell.strip().lower() in _NOT_MEASURED else float(cell))
        except ValueError as error:
            raise UserError(
                f"{place}: the score {cell!r} is no number: leave the cell empty, or name another column "
                "with --score-column"
            ) from error
    return np.array(values, np.float64)


def rank_correlation(scores: Floats, values: Measured) -> tuple[float, int]:
    """Spearman's rho between scores and what was measured, and of how many; nan where it has no meaning."""
    from scipy.stats import spearmanr

    there = ~np.isnan(values)
    many = len(set(scores[there])) > 1 and len(set(values[there])) > 1
    return float(spearmanr(scores[there], values[there]).statistic) if many else math.nan, int(there.sum())
