# SPDX-License-Identifier: Apache-2.0
"""Synthetic proteins whose lowest possible masked loss is known exactly.

Sequences are sampled from a hidden Markov model: domains of a noisy repeated motif, such as those of collagen (GPx),
elastin (VPGVG) or silk (GAGAGS), joined by linkers with natural amino acid frequencies. A small transformer learns it
in minutes, and the difference to the lowest possible loss (hidden_markov.py) measures convergence.
"""

from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from bionemo.data.files import SPLITS
from bionemo.data.proteins.hidden_markov import HiddenMarkovModel

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"

_MOTIFS = ("GPx", "TCx", "NANP", "PEVK", "GLFG", "VPGVG", "CCQPT", "IGDNV", "GAGAGS", "AHHAAD", "YSPTSPS", "LEEKVxM")
# composition of linkers in 256ths, similar to Swiss-Prot, in the order of AMINO_ACIDS
_LINKER_COUNTS = (21, 4, 14, 17, 10, 18, 6, 15, 15, 25, 6, 10, 12, 10, 14, 17, 14, 18, 3, 7)
_GROUP = 256  # records generated together
_MAX_CACHED_RESIDUES = 1 << 28  # sources up to this size keep the generated letters


@cache
def language() -> HiddenMarkovModel:
    """Return the model of all mock proteins: one linker state and a cycle of states for each motif."""
    first = np.cumsum([1, *map(len, _MOTIFS)])
    transitions = np.zeros((first[-1], first[-1]), np.int64)
    emissions = np.tile(np.array(_LINKER_COUNTS), (first[-1], 1))
    for start, motif in zip(first, _MOTIFS, strict=False):
        for phase, letter in enumerate(motif):
            state = start + phase
            transitions[state, start + (phase + 1) % len(motif)] += 246
            transitions[state, start + (phase + 2) % len(motif)] += 3  # deletion
            transitions[state, state] += 3  # insertion
            transitions[state, 0] += 4
            if letter != "x":
                emissions[state] = 4
                emissions[state, AMINO_ACIDS.index(letter)] += 256 - 4 * len(AMINO_ACIDS)
        transitions[0, start] = 3
    transitions[0, 0] = 256 - transitions[0].sum()
    return HiddenMarkovModel(AMINO_ACIDS, transitions, emissions)


class MockSource:
    """A `SequenceSource` that generates sequences of the mock language on demand.

    A record depends only on seed, split and its number: random bits come from a counter-based generator (Philox,
    Salmon et al. 2011). The language is the same for every seed.

    Attributes:
        lengths: residues of each record, int32 [n], uniform between the two bounds.
    """

    def __init__(self, num_sequences: int, min_length: int, max_length: int, seed: int, split: str) -> None:
        self.split = split
        self._key = np.array([seed % 2**64, SPLITS.index(split)], np.uint64)
        bits = self._random_bits(np.zeros(1, np.int64), 1, num_sequences)[0]
        self.lengths = (min_length + bits % np.uint64(max_length - min_length + 1)).astype(np.int32)
        self._ends = np.cumsum(self.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(
        self,
        records: NDArray[np.integer],
        starts: NDArray[np.integer],
        counts: NDArray[np.integer],
        out: NDArray[np.uint8],
        offsets: NDArray[np.integer],
    ) -> None:
        """See SequenceSource."""
        letters, begins = self._letters(np.asarray(records))
        for begin, count, offset in zip((begins + starts).tolist(), counts, offsets, strict=True):
            out[offset : offset + count] = letters[begin : begin + count]

    def text(self, record: int) -> str:
        """Return a whole sequence."""
        letters, begins = self._letters(np.array([record]))
        return letters[begins[0] : begins[0] + self.lengths[record]].tobytes().decode()

    def fields(self, record: int) -> dict[str, str]:
        """Return name and sequence of a record."""
        return {"id": f"mock_{self.split}_{record}", "sequence": self.text(record)}

    def _letters(self, records: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return letters that include the records [k], and the start of each record in them [k]."""
        if self._ends[-1] > _MAX_CACHED_RESIDUES:
            lengths = self.lengths[records].astype(np.int64)
            return self._generate(records), np.cumsum(lengths) - lengths
        letters, is_generated = self._cache
        missing = np.unique(records[~is_generated[records]])
        missing = missing[np.argsort(self.lengths[missing])]  # a group takes the time of its longest record
        lengths = self.lengths[missing].astype(np.int64)
        new = self._generate(missing)
        letters[np.arange(len(new)) + np.repeat(self._ends[missing] - lengths.cumsum(), lengths)] = new
        is_generated[missing] = True
        return letters, self._ends[records] - self.lengths[records]

    @cached_property
    def _cache(self) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Letters of all records, and which records have been generated."""
        return np.empty(self._ends[-1], np.uint8), np.zeros(len(self), bool)

    def _generate(self, records: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Generate the letters of records, concatenated."""
        parts = [np.empty(0, np.uint8)]
        for first in range(0, len(records), _GROUP):
            group = records[first : first + _GROUP]
            lengths = self.lengths[group]
            longest = int(lengths.max())
            bits = self._random_bits(group, 0, 2 + longest // 4)
            parts.append(language().sample(bits, longest)[np.arange(longest) < lengths[:, None]])
        return np.concatenate(parts)

    def _random_bits(self, records: NDArray[np.integer], purpose: int, count: int) -> NDArray[np.uint64]:
        """Return uint64 [k, count] for records [k]; the lowest word of Philox's counter runs within a record."""
        generator = np.random.Philox(key=self._key)
        state = generator.state  # setting it takes a quarter of the time of a new generator
        bits = np.empty((len(records), count), np.uint64)
        for row, record in zip(bits, records.tolist(), strict=True):
            state["state"]["counter"][:] = 0, record, purpose, 0
            generator.state = state
            row[:] = generator.random_raw(count)
        return bits
