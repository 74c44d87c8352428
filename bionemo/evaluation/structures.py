# SPDX-License-Identifier: Apache-2.0
"""Protein chains: sequence, positions and contacts. Shapes: n residues of the sequence, r observed residues."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.evaluation.structure_files import NAMELESS, Polymer, Residue, read_polymer
from bionemo.tokenizers.residues import trim

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
CONTACT = 8.0  # angstroms between C-beta atoms, as in CASP
_X = ord("X")
_JUMPS = 4  # twice the jumps that are accepted in short chains


@dataclass(frozen=True, eq=False)
class Chain:
    """A protein chain.

    Attributes:
        sequence: one letter for each residue.
        positions: [n, 3] coordinates of the C-beta atoms, of C-alpha for glycine, in angstroms; nan if not observed.
        name: name that the authors gave to the chain.
        gaps: number of places where the numbers of the residues jump and there is no bond, in a chain whose sequence
            is not known: residues are missing in `sequence` there.
    """

    sequence: str
    positions: Floats
    name: str = ""
    gaps: int = 0

    @property
    def observed(self) -> int:
        """Number of residues with known positions."""
        return int((~np.isnan(self.positions[:, 0])).sum())

    @property
    def has_side_chains(self) -> bool:
        """Whether C-beta atoms were observed, or all residues are glycine: a C-alpha trace has none."""
        others = np.array([letter != "G" for letter in self.sequence])
        return not others.any() or not np.isnan(self.positions[others]).all()

    def contacts(self) -> Floats:
        """Return the contact map [n, n]: 1 for positions less than 8 angstroms apart, 0 for others, nan if unknown."""
        from scipy.spatial.distance import cdist

        distances = cdist(self.positions, self.positions)
        return np.where(np.isnan(distances), np.nan, distances < CONTACT).astype(np.float32)


def read_chain(path: Path, chain: str | None = None, sequence: str | None = None) -> Chain:
    """Read a chain of the first model of a structure.

    Its sequence is that in the file (`entity_poly_seq` of mmCIF, SEQRES of PDB), which includes residues that were not
    observed; without, that of the observed residues. A modified residue has the letter of its parent, or X.

    Args:
        path: an mmCIF, BinaryCIF or PDB file, which may be compressed with gzip.
        chain: name of the chain, as authors name it; None: the first protein.
        sequence: full sequence of the chain, instead of that in the file.

    Raises:
        UserError: if the file cannot be read, has no such chain, or the chain does not match the sequence.
    """
    polymer = read_polymer(path, chain)
    positions = np.array([residue.position for residue in polymer.residues], np.float32)
    own = polymer.sequence if sequence in (None, polymer.sequence) else None
    if (full := own or sequence) is None:
        jumps = (
            other.number - one.number not in (0, 1) and not other.linked for one, other in pairwise(polymer.residues)
        )
        letters = "".join(residue.letters[0] for residue in polymer.residues)
        return Chain(letters, positions, polymer.name, sum(jumps))
    full = trim(full.encode("ascii", "replace")).decode().upper()
    if odd := [letter for letter in full if not letter.isalpha()]:
        raise UserError(f"{path}: the given sequence contains {odd[0]!r}: give the letters of one chain")
    try:
        places = _place_residues(polymer, full, own is not None)
    except ValueError as error:
        remedy = "correct the file, or give the sequence in sequences.fasta" if own else "correct the given sequence"
        raise UserError(f"{path}, chain {polymer.name or NAMELESS}: {error}: {remedy}") from error
    placed = np.full((len(full), 3), np.nan, np.float32)
    placed[places] = positions
    return Chain(full, placed, polymer.name)


def _place_residues(polymer: Polymer, sequence: str, is_own: bool) -> Integers:
    """Return the positions [r] of the observed residues in a sequence, that of the file if `is_own`, from 0.

    The numbers decide: they are positions, or have a constant difference to them. Otherwise, stretches of bonded
    residues are aligned without gaps or mismatches, other than X.

    Raises:
        ValueError: if a residue does not fit, or several alignments are as good.
    """
    residues, is_numbered = polymer.residues, polymer.is_numbered and is_own
    numbers = np.array([residue.number for residue in residues])
    width = max(len(residue.letters) for residue in residues)
    letters = np.array([list(residue.letters.ljust(width, residue.letters[0]).encode()) for residue in residues]).T
    text = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)
    first = int(numbers[0]) - min(polymer.start if is_own else 1, int(numbers[0]))
    is_increasing = bool((np.diff(numbers) > 0).all())
    steps = numbers - numbers[0] if is_increasing or is_numbered else np.arange(len(numbers))
    shifts = [first, *(range(len(text) - int(steps[-1])) if is_increasing and not is_numbered else ())]

    def compare(shift: int) -> NDArray[np.bool_]:
        return _fit(letters, _look_up(text, steps + shift))

    def shift_numbers() -> Integers | None:
        if (is_increasing or is_numbered) and compare(first).all():
            return steps + first
        found = [shift for shift in shifts[1:] if compare(shift).all()]
        if len(found) > 1:
            raise ValueError(f"the observed residues fit the sequence at {len(found)} positions")
        return steps + found[0] if found else None

    def align() -> Integers | None:
        return None if is_numbered else _align_stretches(residues, first, letters, text)

    # bonded residues are neighbours in the sequence, whatever their numbers are
    agree = all(other.number == one.number + 1 for one, other in pairwise(residues) if other.linked)
    agree &= not any(residue.insertion for residue in residues)
    for method in (shift_numbers, align) if agree or is_numbered else (align, shift_numbers):
        if (places := method()) is not None:
            return places
    shifts = [first, *(() if is_numbered else range(-int(steps[-1]), len(text)))]
    shift = max(shifts, key=lambda each: compare(each).sum() + np.argmin(compare(each)))  # matches, first mismatch
    wrong = int(np.argmin(compare(shift)))
    residue, place = residues[wrong], int(steps[wrong]) + shift
    name = f"residue {residue.number}{residue.insertion}"
    if not 0 <= place < len(text):
        raise ValueError(f"{name} is not in the sequence of {len(text)} residues")
    raise ValueError(f"{name} is {residue.letters[0]}, but {sequence[place]} in the sequence (position {place + 1})")


def _fit(letters: Bytes, text: Bytes) -> NDArray[np.bool_]:
    """Return whether letters [alternatives, r] are those of a text [..., r]; X is unknown."""
    same: NDArray[np.bool_] = (letters.reshape(len(letters), *[1] * (text.ndim - 1), -1) == text).any(0)
    return same | (text == _X) | (letters == _X).any(0)


def _look_up(text: Bytes, places: Integers) -> Bytes:
    """Return the letters at these positions, 0 outside of the text."""
    return np.append(text, np.uint8(0))[np.where((places >= 0) & (places < len(text)), places, len(text))]


def _align_stretches(residues: Sequence[Residue], first: int, letters: Bytes, text: Bytes) -> Integers | None:
    """Align stretches of bonded residues in their order, with the fewest jumps that the numbers do not have.

    `first` is the most likely position of the first residue.

    Returns:
        Positions [r], or None if the stretches do not fit.

    Raises:
        ValueError: if several alignments have the fewest jumps.
    """
    # a residue that was formed from several, such as a chromophore, may have one letter and the numbers of all
    ends = [end for end, (one, other) in enumerate(pairwise(residues), 1) if not other.linked
            or (other.number > one.number + 1 and "X" in one.letters + other.letters)]  # fmt: skip
    best = [(0, 1, [-1])]  # for each place of the latest stretch: cost, number of alignments, positions
    for begin, end in pairwise([0, *ends, len(residues)]):
        if end - begin > len(text):
            return None
        is_linked = bool(begin) and residues[begin].linked
        windows = np.lib.stride_tricks.sliding_window_view(text, end - begin)
        jump = residues[begin].number - residues[begin - 1].number if begin else first + 1
        options = []
        for start in np.flatnonzero(_fit(letters[:, begin:end], windows).all(-1)).tolist():
            found = []
            for cost, ways, places in best:
                step = start - places[-1]
                if step > 0 and not (is_linked and step not in (1, jump)):
                    found.append(
                        (cost + (3 * (step != 1) if is_linked else (2 if begin else 1) * (step != jump)), ways, places)
                    )
            if found:
                cost = min(each[0] for each in found)
                cheapest = [each for each in found if each[0] == cost]
                places = [*cheapest[0][2], *range(start, start + end - begin)]
                options.append((cost, sum(ways for _, ways, _ in cheapest), places))
        if not options:
            return None
        best = options
    cost = min(each[0] for each in best)
    cheapest = [each for each in best if each[0] == cost]
    if cost > max(_JUMPS, len(residues) / 4):  # single letters of any sequence fit somewhere
        return None
    if sum(ways for _, ways, _ in cheapest) > 1:
        raise ValueError("the observed residues fit the sequence in several ways")
    return np.array(cheapest[0][2][1:])
