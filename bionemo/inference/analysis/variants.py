# SPDX-License-Identifier: Apache-2.0
"""How a masked language model rates variants of a protein, without having seen a measurement (ESM-1v).

Meier et al. 2021, "Language models enable zero-shot prediction of the effects of mutations on protein function",
section 3. Shapes: n residues, k of them asked about, V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bionemo.common.errors import UserError
from bionemo.inference.analysis.residues import Protein, read_protein
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import Advance, silent

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
METHODS = ("masked-marginal", "wild-type-marginal")
_SYNONYMS = ("", "wt", "wild-type")
_MUTATION = re.compile(r"(\S)(-?\d{1,9})(\S)")


class Mutation(NamedTuple):
    """One residue in the place of another.

    Attributes:
        wild: letter of the wild type.
        position: as the user counts.
        mutant: letter of the variant.
    """

    wild: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild}{self.position}{self.mutant}"


def score_variants(
    model: TrainedModel,
    sequence: str,
    variants: Sequence[str],
    method: str = "masked-marginal",
    offset: int = 0,
    names: Sequence[str] | None = None,
    advance: Advance = silent,
) -> Floats:
    """Score variants: sum over the mutations of log p(mutant) - log p(wild type), in nats; above 0 is likelier.

    `masked-marginal` asks the model about each mutated residue while it is masked in the wild type, one pass for each
    such residue, however many variants share it; `wild-type-marginal` takes one pass of the wild type as it is.

    Args:
        model: a masked language model.
        sequence: of the wild type.
        variants: such as `A24G`, or `A24G:K30R` (`,` does as well); `wt` or nothing is the wild type, which scores 0.
        method: one of METHODS.
        offset: added to positions: the first residue has the number 1 + offset.
        names: what the variants are called in messages; None: `variant 1`, ...
        advance: told how many residues are done.

    Returns:
        [variants] fp32.

    Raises:
        UserError: for a model of another kind, a sequence too long for it, and a variant that is none of this one.
    """
    protein = read_protein(model, sequence)
    called = names or [f"variant {number}" for number in range(1, len(variants) + 1)]
    known = {protein.alphabet.tokens[i]: int(i) for i in protein.alphabet.residue_ids}
    found = [
        (number, *each)
        for number, (text, name) in enumerate(zip(variants, called, strict=True))
        for each in _tokens(text, name, protein.letters, known, offset)
    ]
    number, place, wild, mutant = np.array(found, np.int64).reshape(-1, 4).T
    places, row = np.unique(place, return_inverse=True)
    said = _log_probabilities(model, protein, places, method, advance)
    gains = said[row, mutant] - said[row, wild]
    return np.bincount(number, gains, minlength=len(variants)).astype(np.float32)


def scan(model: TrainedModel, sequence: str, method: str = "masked-marginal", advance: Advance = silent) -> Floats:
    """Score every amino acid at every position, [n, 20] fp32, in the order of AMINO_ACIDS; 0 for the wild type's own.

    Args:
        model: a masked language model.
        sequence: of the wild type.
        method: one of METHODS.
        advance: told how many residues are done.

    Raises:
        UserError: as `score_variants`.
    """
    protein = read_protein(model, sequence)
    said = _log_probabilities(model, protein, np.arange(len(protein.ids)), method, advance)
    twenty = protein.alphabet.table[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)]
    return said[:, twenty] - np.take_along_axis(said, protein.ids[:, None].astype(np.int64), 1)


def mutations(variant: str, name: str) -> list[Mutation]:
    """Read the mutations of a variant; none is the wild type.

    Args:
        variant: see `score_variants`.
        name: what it is called in messages.

    Raises:
        UserError: when it is not written so, or mutates a residue twice.
    """
    if variant.strip().lower() in _SYNONYMS:
        return []
    found = []
    for part in re.split("[:,]", variant):
        match = _MUTATION.fullmatch(part.strip())
        if not match:
            raise UserError(
                f"{name}, {variant}: expected a residue, its position and what is there instead, as in A24G, several "
                "joined by ':'"
            )
        found.append(Mutation(match[1], int(match[2]), match[3]))
    positions = [each.position for each in found]
    for position in positions:
        if positions.count(position) > 1:
            raise UserError(f"{name}, {variant}: residue {position} is mutated twice: leave one of the two")
    return found


def place_of(mutation: Mutation, letters: str, offset: int, name: str) -> int:
    """Find what is mutated, from 0.

    Raises:
        UserError: when the sequence has no such residue there.
    """
    place = mutation.position - 1 - offset
    if not 0 <= place < len(letters):
        raise UserError(
            f"{name}, {mutation}: the sequence has residues {1 + offset} to {len(letters) + offset}: check position "
            "and offset"
        )
    return place


def _tokens(
    variant: str, name: str, letters: str, known: Mapping[str, int], offset: int
) -> Iterator[tuple[int, int, int]]:
    """Place, token of the wild type, and token of the variant for each mutation."""
    for each in mutations(variant, name):
        for letter in (each.wild, each.mutant):
            if not letter.isalpha() or letter not in known:
                raise UserError(f"{name}, {each}: {letter!r} is no residue that the model knows: leave it out")
        place = place_of(each, letters, offset, name)
        if letters[place] != each.wild:
            raise UserError(
                f"{name}, {each}: residue {each.position} is {letters[place]}, not {each.wild}: check the "
                "sequence and the offset"
            )
        yield place, known[each.wild], known[each.mutant]


def _log_probabilities(
    model: TrainedModel, protein: Protein, places: np.ndarray, method: str, advance: Advance
) -> Floats:
    """What the model says of some residues, [k, V]."""
    if method not in METHODS:
        raise UserError(f"method={method!r} is unknown: choose of {', '.join(METHODS)}")
    if method == "wild-type-marginal":
        logits = torch.from_numpy(model.logits([protein.letters])[0][places])
        advance(len(places))
        return logits.log_softmax(-1).numpy()
    said = [np.zeros((0, protein.alphabet.vocab_size), np.float32)]
    for part in model.masked_log_probabilities(protein.ids, places):
        said.append(part.cpu().numpy())
        advance(len(part))
    return np.concatenate(said)
