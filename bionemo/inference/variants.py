# SPDX-License-Identifier: Apache-2.0
"""Zero-shot scores of protein variants from a masked language model (ESM-1v).

Meier et al. 2021, "Language models enable zero-shot prediction of the effects of mutations on protein function",
section 3 and appendix A. Shapes: n residues, k mutated residues, V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.inference.batching import Ids
from bionemo.inference.hgvs import is_no_substitution, split_variant
from bionemo.inference.outputs import Floats, InferenceModel
from bionemo.inference.progress import Advance, no_progress
from bionemo.inference.protein import Protein, tokenize_protein
from bionemo.inference.windows import WindowType, predict_residues

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
MARGINALS = ("masked-marginal", "wild-type-marginal")
METHODS = (*MARGINALS, "pseudo-perplexity")
_MUTATION = re.compile(r"(\S)(-?\d{1,9})(\S)")


class NoSubstitutionError(UserError):
    """A variant has a stop codon, deletion, insertion or frameshift, which a masked language model cannot score."""


class Mutation(NamedTuple):
    """A substitution: letter of the wild type, position in the user's numbering, letter of the variant."""

    wild: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild}{self.position}{self.mutant}"


def score_variants(
    model: InferenceModel, sequence: str, variants: Sequence[str], method: str = "masked-marginal", offset: int = 0,
    names: Sequence[str] | None = None, advance: Advance = no_progress, window: WindowType | None = None,
) -> Floats:  # fmt: skip
    """Score variants, in nats; a variant above 0 is likelier than the wild type.

    `masked-marginal`: the sum over mutations of log p(mutant) - log p(wild type), each mutated residue masked in the
    wild type, in one pass for each such residue, however many variants share it. `wild-type-marginal`: the same
    without masks, in one pass. `pseudo-perplexity`: the pseudo-log-likelihood of the variant minus that of the wild
    type, in one pass for each residue of each variant.

    Args:
        model: masked language model.
        sequence: wild type.
        variants: such as `A24G` or `A24G:K30R` (or with `,`), or in HGVS notation such as `p.Ala24Gly`; `wt` or "" is
            the wild type, with score 0.
        method: one of METHODS.
        offset: the first residue has the number 1 + offset.
        names: names of the variants in error messages; None: `variant 1`, ...
        advance: called with the number of finished residues, see `count_residues`.
        window: how windows are chosen if the protein is longer than the model; None: raise an error.

    Returns:
        [variants] fp32.

    Raises:
        UserError: as in `tokenize_protein`, or if a variant does not match the sequence.
    """
    protein = tokenize_protein(model, sequence, any_length=window is not None)
    names = names or [f"variant {number}" for number in range(1, len(variants) + 1)]
    token_of = {protein.alphabet.tokens[i]: int(i) for i in protein.alphabet.residue_ids}
    found = [
        (number, *mutation)
        for number, (text, name) in enumerate(zip(variants, names, strict=True))
        for mutation in _mutation_tokens(text, name, protein.letters, token_of, offset)
    ]
    number, index, wild, mutant = np.array(found, np.int64).reshape(-1, 4).T
    if method == "pseudo-perplexity":
        return _pseudo_likelihoods(model, protein, len(variants), number, index, mutant, window, advance)
    indices, row = np.unique(index, return_inverse=True)
    log_probabilities_kV = _log_probabilities(model, protein, indices, method, window, advance)
    scores = log_probabilities_kV[row, mutant] - log_probabilities_kV[row, wild]
    return np.bincount(number, scores, minlength=len(variants)).astype(np.float32)


def count_residues(sequence: str, mutations: Sequence[Sequence[Mutation]], method: str) -> int:
    """Return the number of residues for which `score_variants` computes predictions."""
    if method == "pseudo-perplexity":
        return len(sequence) * (1 + sum(map(bool, mutations)))
    return len({mutation.position for each in mutations for mutation in each})


def scan(
    model: InferenceModel, sequence: str, method: str = "masked-marginal", advance: Advance = no_progress,
    window: WindowType | None = None,
) -> Floats:  # fmt: skip
    """Score every substitution at every position, [n, 20] fp32, in the order of AMINO_ACIDS; 0 for the wild type.

    See `score_variants` for the arguments and errors; the method is a marginal.
    """
    protein = tokenize_protein(model, sequence, any_length=window is not None)
    log_probabilities_nV = _log_probabilities(model, protein, np.arange(len(protein.ids)), method, window, advance)
    amino_acids = protein.alphabet.table[np.frombuffer(AMINO_ACIDS.encode(), np.uint8)]
    wild_type = np.take_along_axis(log_probabilities_nV, protein.ids[:, None].astype(np.int64), 1)
    return log_probabilities_nV[:, amino_acids] - wild_type


def parse_mutations(variant: str, name: str) -> list[Mutation]:
    """Parse the mutations of a variant, see `score_variants`; [] for the wild type.

    Raises:
        NoSubstitutionError: if the variant has anything else than substitutions.
        UserError: if the format is wrong, or a residue is mutated twice.
    """
    found, others = [], []
    for part in split_variant(variant):
        match = _MUTATION.fullmatch(part)
        if is_no_substitution(part):
            others.append(part)
        elif match:
            found.append(Mutation(match[1], int(match[2]), match[3]))
        else:
            raise UserError(
                f"{name}, {variant}: expected a residue, its position and its replacement, as in A24G, several joined "
                "by ':', or HGVS notation, as in p.Ala24Gly or p.[Ala24Gly;Lys30Arg]"
            )
    if others:
        raise NoSubstitutionError(f"{name}, {variant}: only substitutions can be scored: remove the variant")
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
    model: InferenceModel, protein: Protein, indices: NDArray[np.int64], method: str, window: WindowType | None,
    advance: Advance,
) -> Floats:  # fmt: skip
    """Return log-probabilities at some residues, [k, V]."""
    if method not in MARGINALS:
        raise UserError(f"method={method!r} is unknown: choose from {', '.join(MARGINALS)}")
    return predict_residues(model, protein.ids, indices, method == "masked-marginal", window or "optimal", advance)


def score_sequences(
    model: InferenceModel, wild_type: str, sequences: Sequence[str], names: Sequence[str], method: str,
    window: WindowType = "optimal",
) -> Floats:  # fmt: skip
    """Score variants of any length, also with insertions and deletions, in nats: [N] fp32.

    The score is the pseudo-log-likelihood ratio of Brandes et al. 2023, "Genome-wide prediction of disease variant
    effects with a deep protein language model": the sum of the log-probabilities of all residues of the variant minus
    that of the wild type. All residues are predicted in one pass without masks; with the method `pseudo-perplexity`
    each is masked in a pass of its own (Salazar et al. 2020, "Masked Language Model Scoring").

    Raises:
        UserError: as in `tokenize_protein`, with the name of the sequence.
    """
    found = []
    for text, name in zip((wild_type, *sequences), ("the wild type", *names), strict=True):
        ids = tokenize_protein(model, text, name, any_length=True).ids
        found.append(_log_likelihood(model, ids, method == "pseudo-perplexity", window))
    return (np.array(found[1:]) - found[0]).astype(np.float32)


def _log_likelihood(
    model: InferenceModel, ids: Ids, masked: bool, window: WindowType, advance: Advance = no_progress
) -> float:
    """Return the sum of the log-probabilities of all residues, each of them masked or none."""
    every = np.arange(len(ids))
    log_probabilities_nV = predict_residues(model, ids, every, masked, window, advance)
    return float(log_probabilities_nV[every, ids].sum(dtype=np.float64))


def _pseudo_likelihoods(
    model: InferenceModel, protein: Protein, variants: int, number: NDArray[np.int64], index: NDArray[np.int64],
    mutant: NDArray[np.int64], window: WindowType | None, advance: Advance,
) -> Floats:  # fmt: skip
    """Return pseudo-log-likelihoods relative to the wild type; `number` are the variants of the mutations."""
    likelihood = partial(_log_likelihood, model, masked=True, window=window or "optimal", advance=advance)
    scores, wild_type = np.zeros(variants, np.float32), likelihood(protein.ids) if len(number) else 0.0
    for variant in np.unique(number):
        ids, mutations = protein.ids.copy(), number == variant
        ids[index[mutations]] = mutant[mutations]
        scores[variant] = likelihood(ids) - wild_type
    return scores
