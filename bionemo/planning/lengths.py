# SPDX-License-Identifier: Apache-2.0
"""How long sequences are, which decides what attention costs: data is not opened for a plan."""

import math
from dataclasses import dataclass

from bionemo.config.schema import MaskedDataConfig, ModelConfig

UNIREF = (210.0, 278.0)  # median and mean residues of UniRef50, close to a lognormal distribution
_ENDS = 2  # tokens that begin and end a sequence


@dataclass(frozen=True)
class Tokens:
    """The tokens of a row.

    Attributes:
        row: length of a row.
        filled: share of its tokens that belong to a sequence.
        mean: tokens of a sequence, begin and end included.
        attended: tokens that a token of a sequence attends to, on average; its own sequence's, so E[n^2] / E[n] for
            sequences of n tokens: long ones hold more of the tokens than their number says.
        asked: share of the filled tokens that the model is asked for.
        source: of the lengths, in words.
    """

    row: int
    filled: float
    mean: float
    attended: float
    asked: float
    source: str

    @property
    def asked_in_row(self) -> float:
        """Tokens of a row that the model is asked for."""
        return self.row * self.filled * self.asked

    @property
    def sequences(self) -> float:
        """Sequences in a row."""
        return self.row * self.filled / self.mean


def tokens_of(config: ModelConfig) -> Tokens:
    """Work out what rows hold; packed rows are taken as full, they are to 98 % and more."""
    data, row = config.data, config.seq_length
    assert isinstance(data, MaskedDataConfig), "planning/sizes.py knows no other kind"
    if data.data_impl == "mock":
        first, last = data.mock.min_length, data.mock.max_length
        cut = [min(length + _ENDS, row) for length in range(first, last + 1)]
        mean, square = sum(cut) / len(cut), sum(n * n for n in cut) / len(cut)
        source = f"mock sequences of {first} to {last} residues"
    else:
        mean, square = (cut_moment(power, row - _ENDS) for power in (1, 2))
        mean, square = mean + _ENDS, square + 2 * _ENDS * mean + _ENDS**2
        source = f"lengths as in UniRef50 (median {UNIREF[0]:.0f}, mean {UNIREF[1]:.0f} residues), cut at {row} tokens"
    return Tokens(row, 1.0 if data.packing else mean / row, mean, square / mean, data.modify_percent, source)


def cut_moment(power: int, limit: float, median: float = UNIREF[0], mean: float = UNIREF[1]) -> float:
    """E[min(l, limit)^power] of lognormal lengths.

    With l = median * exp(sigma z): the part below the limit is the full moment times a normal tail of shifted mean,
    median^k exp(k^2 sigma^2 / 2) Phi((ln(limit / median) - k sigma^2) / sigma); the rest counts limit^k.
    """
    variance = 2 * math.log(mean / median)
    sigma, edge = math.sqrt(variance), math.log(limit / median)
    below = median**power * math.exp(power**2 * variance / 2) * _normal((edge - power * variance) / sigma)
    return below + limit**power * (1 - _normal(edge / sigma))


def _normal(x: float) -> float:
    """Share of a standard normal distribution below x."""
    return (1 + math.erf(x / math.sqrt(2))) / 2
