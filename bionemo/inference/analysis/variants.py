# SPDX-License-Identifier: Apache-2.0
"""Zero-shot scores of protein variants from a masked language model (ESM-1v).

Meier et al. 2021, "Language models enable zero-shot prediction of the effects of mutations on protein function",
section 3. Shapes: n residues, k mutated residues, V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bionemo.common.errors import UserError
from bionemo.inference.analysis.protein import Protein, tokenize_protein
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import Advance, no_progress

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
METHODS = ("masked-marginal", "wild-type-marginal")
_WILD_TYPE = ("", "wt", "wild-type")
_MUTATION = re.compile(r"(\S)(-?\d{1,9})(\S)")


class Mutation(NamedTuple):
    """A substitution: letter of the wild type, position in the user's numbering, letter of the variant."""

    wild: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild}{self.position}{self.mutant}"


def score_variants(
    model: TrainedModel, sequence: str, variants: Sequence[str], method: str = "masked-marginal", offset: int = 0,
    names: Sequence[str] | None = None, advance: Advance = no_progress,
) -> Floats:  # fmt: skip
    """Score variants: the sum over mutations of log p(mutant) - log p(wild type), in nats; above 0 is likelier.

    `masked-marginal` masks each mutated residue in the wild type, in one pass for each such residue, however many
    variants share it. `wild-type-marginal` needs one pass of the unmasked wild type.

    Args:
        model: masked language model.
        sequence: wild type.
        variants: such as `A24G` or `A24G:K30R` (or with `,`); `wt` or "" is the wild type, with score 0.
        method: one of METHODS.
        offset: the first residue has the number 1 + offset.
        names: names of the variants in error messages; None: `variant 1`, ...
        advance: called with the number of finished residues.

    Returns:
        [variants] fp32.

    Raises:
        UserError: as in `tokenize_protein`, or if a variant does not match the sequence.
    """
    protein = tokenize_protein(model, sequence)
    names = names or [f"variant {number}" for number in range(1, len(variants) + 1)]
    token_of = {protein.alphabet.tokens[i]: int(i) for i in protein.alphabet.residue_ids}
    found = [
        (number, *mutation)
        for number, (text, name) in enumerate(zip(variants, names, strict=True))
        for mutation in _mutation_tokens(text, name, protein.letters, token_of, offset)
    ]
    number, index, wild, mutant = np.array(found, np.int64).reshape(-1, 4).T
    indices, row = np.unique(index, return_inverse=True)
    log_probabilities_kV = _log_probabilities(model, protein, indices, method, advance)
    scores = log_probabilities_kV[row, mutant] - log_probabilities_kV[row, wild]
    return np.bincount(number, scores, minlength=len(variants)).astype(np.float32)


def scan(
    model: TrainedModel, sequence: str, method: str = "masked-marginal", advance: Advance = no_progress
) -> Floats:
    """Score every substitution at every position, [n, 20] fp32, in the order of AMINO_ACIDS; 0 for the wild type.

    Errors as in `score_variants`.
    """
    protein = tokenize_protein(model, sequence)
    log_probabilities_nV = _log_probabilities(model, protein, np.arange(len(protein.ids)), method, advance)
    amino_acids = protein.alphabet.table[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)]
    wild_type = np.take_along_axis(log_probabilities_nV, protein.ids[:, None].astype(np.int64), 1)
    return log_probabilities_nV[:, amino_acids] - wild_type


def parse_mutations(variant: str, name: str) -> list[Mutation]:
    """Parse the mutations of a variant, see `score_variants`; [] for the wild type.

    Raises:
        UserError: if the format is wrong, or a residue is mutated twice.
    """
    if variant.strip().lower() in _WILD_TYPE:
        return []
    found = []
    for part in re.split("[:,]", variant):
        match = _MUTATION.fullmatch(part.strip())
        if not match:
            raise UserError(
                f"{name}, {variant}: expected a residue, its position and its replacement, as in A24G, several "
                "joined by ':'"
            )
        found.append(Mutation(match[1], int(match[2]), match[3]))
    positions = [mutation.position for mutation in found]
    for position in positions:
        if positions.count(position) > 1:
            raise UserError(f"{name}, {variant}: residue {position} is mutated twice: remove one of the two")
    return found


def index_of(mutation: Mutation, letters: str, offset: int, name: str) -> int:
    """Return the index of the mutated residue, from 0.

    Raises:
        UserError: if the sequence has no residue there.
    """
    index = mutation.position - 1 - offset
    if not 0 <= index < len(letters):
        raise UserError(
            f"{name}, {mutation}: the sequence has residues {1 + offset} to {len(letters) + offset}: check position "
            "and offset"
        )
    return index


def _mutation_tokens(
    variant: str, name: str, letters: str, token_of: Mapping[str, int], offset: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the index, the token of the wild type and the token of the variant for each mutation."""
    for mutation in parse_mutations(variant, name):
        for letter in (mutation.wild, mutation.mutant):
            if not letter.isalpha() or letter not in token_of:
                raise UserError(f"{name}, {mutation}: {letter!r} is not a residue of the vocabulary: remove it")
        index = index_of(mutation, letters, offset, name)
        if letters[index] != mutation.wild:
            raise UserError(
                f"{name}, {mutation}: residue {mutation.position} is {letters[index]}, not {mutation.wild}: check the "
                "sequence and the offset"
            )
        yield index, token_of[mutation.wild], token_of[mutation.mutant]


def _log_probabilities(
    model: TrainedModel, protein: Protein, indices: np.ndarray, method: str, advance: Advance
) -> Floats:
    """Return log-probabilities at some residues, [k, V]."""
    if method not in METHODS:
        raise UserError(f"method={method!r} is unknown: choose from {', '.join(METHODS)}")
    if method == "wild-type-marginal":
        logits = torch.from_numpy(model.logits([protein.letters])[0][indices])
        advance(len(indices))
        return logits.log_softmax(-1).numpy()
    found = [np.zeros((0, protein.alphabet.vocab_size), np.float32)]
    for part in model.masked_log_probabilities(protein.ids, indices):
        found.append(part.cpu().numpy())
        advance(len(part))
    return np.concatenate(found)
