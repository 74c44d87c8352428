# SPDX-License-Identifier: Apache-2.0
"""An endless synthetic protein language whose best possible masked loss is known exactly.

Sequences are drawn from a hidden Markov model: domains of a noisy repeated motif, in the manner of collagen (GPx),
elastin (VPGVG) or silk (GAGAGS), joined by linkers of natural amino-acid frequencies. Neighbours tell which motif a
residue belongs to and at which phase, so a small transformer learns it in minutes, and no download is needed. The
gap to the best possible loss (hidden_markov.py) is an absolute measure of convergence.
"""

from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.proteins.hidden_markov import MASKED, Corruption, HiddenMarkov

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"

_MOTIFS = ("GPx", "TCx", "NANP", "PEVK", "GLFG", "VPGVG", "CCQPT", "IGDNV", "GAGAGS", "AHHAAD", "YSPTSPS", "LEEKVxM")
# composition of linkers, close to that of Swiss-Prot, in 256ths and in the order of AMINO_ACIDS
_COMMON = (21, 4, 14, 17, 10, 18, 6, 15, 15, 25, 6, 10, 12, 10, 14, 17, 14, 18, 3, 7)
_SPLITS = ("train", "val", "test")
_BLOCK = 256  # records made together
_KEEP = 1 << 28  # residues: sources up to this size keep what they made


@cache
def language() -> HiddenMarkov:
    """The language of every ``MockSource``: one linker state and a cycle of states per motif."""
    first = np.cumsum([1, *map(len, _MOTIFS)])
    steps = np.zeros((first[-1], first[-1]), np.int64)
    emits = np.tile(np.array(_COMMON), (first[-1], 1))
    for start, motif in zip(first, _MOTIFS, strict=False):
        for phase, letter in enumerate(motif):
            state = start + phase
            steps[state, start + (phase + 1) % len(motif)] += 246
            steps[state, start + (phase + 2) % len(motif)] += 3  # a residue is skipped
            steps[state, state] += 3  # or inserted
            steps[state, 0] += 4
            if letter != "x":
                emits[state] = 4
                emits[state, AMINO_ACIDS.index(letter)] += 256 - 4 * len(AMINO_ACIDS)
        steps[0, start] = 3
    steps[0, 0] = 256 - steps[0].sum()
    return HiddenMarkov(AMINO_ACIDS, steps, emits)


class MockSource:
    """Sequences of the language, made on demand: a ``SequenceSource`` that needs no file.

    A record follows from (seed, split, its number) by a counter-based generator (Philox, Salmon et al. 2011), so any
    can be made without the others, on any machine, however many there are. The language is the same for every seed.

    Attributes:
        lengths: residues per record, int32 [n], uniform between the two bounds.
    """

    def __init__(self, num_sequences: int, min_length: int, max_length: int, seed: int, split: str) -> None:
        if num_sequences < 1:
            raise UserError(f"mock data: num_sequences is {num_sequences}: ask for at least one sequence")
        if not 1 <= min_length <= max_length:
            raise UserError(f"mock data: min_length {min_length}, max_length {max_length}: need 1 <= min <= max")
        if split not in _SPLITS:
            raise UserError(f"mock data: split '{split}' is not known: choose one of {', '.join(_SPLITS)}")
        self.split = split
        self._key = np.array([seed % 2**64, _SPLITS.index(split)], np.uint64)
        words = self._stream(0, purpose=1).random_raw(num_sequences)
        self.lengths = (min_length + words % np.uint64(max_length - min_length + 1)).astype(np.int32)
        self._ends = np.cumsum(self.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(
        self,
        records: NDArray[np.integer],
        starts: NDArray[np.integer],
        counts: NDArray[np.integer],
        out: NDArray[np.uint8],
        positions: NDArray[np.integer],
    ) -> None:
        """Copy letters [start, start + count) of each record, as ASCII, to out[position : position + count]."""
        letters, begins = self._letters(np.asarray(records))
        for begin, count, position in zip((begins + starts).tolist(), counts, positions, strict=True):
            out[position : position + count] = letters[begin : begin + count]

    def text(self, record: int) -> str:
        """Give a whole sequence."""
        letters, begins = self._letters(np.array([record]))
        return letters[begins[0] : begins[0] + self.lengths[record]].tobytes().decode()

    def fields(self, record: int) -> dict[str, str]:
        """Give the name and the sequence of a record."""
        return {"id": f"mock_{self.split}_{record}", "sequence": self.text(record)}

    def _letters(self, records: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Letters that hold at least the ``records`` [k], and where in them each record begins [k]."""
        if self._ends[-1] > _KEEP:
            lengths = self.lengths[records].astype(np.int64)
            return self._make(records), np.cumsum(lengths) - lengths
        letters, made = self._kept
        for block in np.unique(records // _BLOCK):
            if not made[block]:
                members = np.arange(block * _BLOCK, min(len(self), (block + 1) * _BLOCK))
                end = self._ends[members[-1]]
                fresh = self._make(members)
                letters[end - len(fresh) : end] = fresh
                made[block] = True
        return letters, self._ends[records] - self.lengths[records]

    @cached_property
    def _kept(self) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Room for all letters, which the system gives as it is written, and which blocks of records are there."""
        return np.empty(self._ends[-1], np.uint8), np.zeros(-(-len(self) // _BLOCK), bool)

    def _make(self, records: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Letters of the records, end to end."""
        parts = [np.empty(0, np.uint8)]
        for first in range(0, len(records), _BLOCK):
            block = records[first : first + _BLOCK]
            lengths = self.lengths[block]
            longest = int(lengths.max())
            words = np.empty((len(block), 2 + longest // 4), np.uint64)
            for row, record in zip(words, block.tolist(), strict=True):
                row[:] = self._stream(record, purpose=0).random_raw(len(row))
            parts.append(language().sample(words, longest)[np.arange(longest) < lengths[:, None]])
        return np.concatenate(parts)

    def _stream(self, record: int, purpose: int) -> np.random.Philox:
        """Random words of a record; the low quarter of the counter runs along them."""
        return np.random.Philox(key=self._key, counter=np.array([0, record, purpose, 0], np.uint64))


def optimal_masked_loss(
    source: MockSource, records: NDArray[np.integer], corruption: Corruption, seed: int
) -> tuple[float, float]:
    """Estimate the loss that no model can beat on such records: the exact optimum under randomly drawn masks.

    Args:
        source: where the records are.
        records: their numbers [k]; more of them make the estimate sharper.
        corruption: what is hidden.
        seed: of the masks.

    Returns:
        Nats per asked residue, pooled over the records, and its standard error (records taken as independent).
    """
    model = language()
    lengths = source.lengths[records].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    letters = np.empty(lengths.sum(), np.uint8)
    source.gather(records, np.zeros_like(lengths), lengths, letters, starts)
    rank = np.searchsorted(np.frombuffer(AMINO_ACIDS.encode(), np.uint8), letters)

    draws = np.random.default_rng(seed)
    asked = draws.random(len(letters)) < corruption.modify_percent
    kind = draws.random(len(letters))
    others = (rank + draws.integers(1, corruption.alternatives + 1, len(letters))) % (corruption.alternatives + 1)
    tokens = np.frombuffer(AMINO_ACIDS.ljust(256, "X").encode(), np.uint8)  # all foreign tokens say the same
    shown = letters.astype(np.int16)
    perturbed = kind < corruption.mask_percent + corruption.perturb_percent
    shown[asked & perturbed] = tokens[others[asked & perturbed]]
    shown[asked & (kind < corruption.mask_percent)] = MASKED

    best = model.posteriors(shown, asked, lengths, corruption)
    nats = np.zeros(len(letters))
    nats[asked] = -np.log(best[np.arange(len(best)), rank[asked]])
    mean = nats.sum() / asked.sum()
    residuals = np.add.reduceat(np.where(asked, nats - mean, 0.0), starts)
    return float(mean), float(np.sqrt((residuals**2).sum()) / asked.sum())


def best_loss(
    shown: NDArray[np.int16],
    asked: NDArray[np.bool_],
    truth: NDArray[np.int16],
    lengths: NDArray[np.int64],
    corruption: Corruption,
) -> float:
    """Mean nats of the best possible predictor on sequences of the language that were already corrupted.

    Args:
        shown: [n] ASCII of what is seen of each residue, MASKED where it is hidden; sequences end to end.
        asked: [n] which residues are asked for.
        truth: [m] ASCII of the asked residues, in order.
        lengths: [N] residues of each sequence.
        corruption: how the asked residues were hidden.
    """
    best = language().posteriors(shown, asked, lengths, corruption)
    rank = np.searchsorted(np.frombuffer(AMINO_ACIDS.encode(), np.uint8), truth)
    return float(-np.log(best[np.arange(len(best)), rank]).mean())
