# SPDX-License-Identifier: Apache-2.0
"""How long sequences are, which decides what attention costs: data is not opened for a plan."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, pstdev

from bionemo.config.schema import (
    DataConfig,
    MaskedDataConfig,
    ModelConfig,
    MoleculeDataConfig,
    ProteinDataConfig,
    SpanDataConfig,
    TextDataConfig,
)

UNIREF = (210.0, 278.0)  # median and mean residues of UniRef50, close to a lognormal distribution
ZINC = (43.0, 8.0)  # mean and deviation of the tokens of ZINC15's SMILES in random forms, close to a normal one
OPENWEBTEXT = 1128.0  # mean tokens of a document: 9.04 thousand million in 8.01 million
MOCK_TEXT = 256.0  # the same of data/mock_text.py
_ENDS = 2  # tokens that begin and end a sequence
_GRAIN = 64  # as in data/collate.py
_LIKELY = 10_000  # lengths that stand for a distribution


@dataclass(frozen=True)
class Tokens:
    """What a stack of layers reads of a row; a micro-batch is so many rows.

    Attributes:
        row: length of a row; of rows that are as long as their sequence, the mean.
        filled: share of its tokens that belong to a sequence.
        mean: tokens of a sequence, begin and end included.
        longest: tokens of the longest.
        attended: tokens of the sequence that a token belongs to, on average; E[n^2] / E[n] for sequences of n tokens:
            long ones hold more of the tokens than their number says.
        asked: share of the filled tokens that the model is asked for.
        source: of the lengths, in words.
        crossed: in a decoder, tokens of the encoder's sequence that belongs to a token's own; E[n m] / E[n].
        spread: standard deviation of a row's length.
        grain: what the tokens of a micro-batch are a multiple of; filler makes up for the rest.
    """

    row: float
    filled: float
    mean: float
    longest: int
    attended: float
    asked: float
    source: str
    crossed: float = 0.0
    spread: float = 0.0
    grain: int = 1

    def count(self, rows: int) -> int:
        """Tokens of a micro-batch of so many rows, filler included."""
        return math.ceil(rows * self.row / self.grain) * self.grain

    def crowded(self, rows: int) -> "Tokens":
        """The same of a micro-batch larger than all but one in millions: five standard deviations."""
        return replace(self, row=min(self.row + 5 * self.spread / math.sqrt(rows), max(self.row, self.longest)))

    def held(self, rows: int) -> float:
        """Tokens of its sequences."""
        return rows * self.row * self.filled

    @property
    def sequences(self) -> float:
        """Sequences in a row."""
        return self.row * self.filled / self.mean


@dataclass(frozen=True)
class _Side:
    """One side of samples: what a stack reads of them.

    Attributes:
        row: tokens that a row has room for.
        lengths: of sequences, all equally likely; in the same order on both sides.
        asked: share of the tokens that the model is asked for.
    """

    row: int
    lengths: list[float]
    asked: float


def tokens_of(config: ModelConfig) -> tuple[Tokens, ...]:
    """Work out what each stack of layers reads; packed rows are taken as full, they are to 98 % and more."""
    data, row = config.data, config.seq_length
    if isinstance(data, TextDataConfig):
        return (_text(config, data),)
    if isinstance(data, MoleculeDataConfig):
        source = f"SMILES of {ZINC[0]:.0f} tokens on average, as in ZINC15, cut at {row - 1}"
        written = [min(length, row - 1) for length in _likely(NormalDist(*ZINC))]
        left = unmasked(data.mask_prob, data.span_lambda) if data.encoder_mask else 1.0
        sides = [_Side(row, [left * n for n in written], 0.0), _Side(row, [n + 1 for n in written], 1.0)]
    elif isinstance(data, SpanDataConfig):
        residues, source = _residues(data, row)
        said = [2 * max(round(n * data.masked_lm_prob), 1) + 1.0 for n in residues]
        sides = [_Side(row, residues, 0.0), _Side(data.seq_length_dec, said, 1.0)]
    else:
        assert isinstance(data, MaskedDataConfig), "planning/sizes.py knows no other kind"
        residues, source = _residues(data, row - _ENDS)
        sides = [_Side(row, [n + _ENDS for n in residues], data.modify_percent)]
    return _streams(config.data, sides, source)


def _streams(data: DataConfig, sides: list[_Side], source: str) -> tuple[Tokens, ...]:
    """Put sequences into rows: as many as fit on all sides, or one."""
    shares = [max(sizes) for sizes in zip(*([n / side.row for n in side.lengths] for side in sides), strict=True)]
    compact = data.dynamic_padding and not data.packing
    sequences = 1 / fmean(shares) if data.packing else 1.0
    read = sides[0].lengths
    found = []
    for side in sides:
        mean = fmean(side.lengths)
        row = mean if compact else side.row
        found.append(
            Tokens(
                row=row,
                filled=sequences * mean / row,
                mean=mean,
                longest=math.ceil(max(side.lengths)),
                attended=_product(side.lengths, side.lengths) / mean,
                asked=side.asked,
                source=source,
                crossed=0.0 if side is sides[0] else _product(side.lengths, read) / mean,
                spread=pstdev(side.lengths) if compact else 0.0,
                grain=_GRAIN if compact else 1,
            )
        )
    return tuple(found)


def _text(config: ModelConfig, data: TextDataConfig) -> Tokens:
    """Rows are full; with `reset_attention_mask` they are cut where a document ends, by chance 1 / mean at each token.

    Two tokens at a distance k are then of one piece with a chance of (1 - 1 / mean)^k.
    """
    row = config.seq_length
    end = 1 / (MOCK_TEXT if data.data_impl == "mock" else OPENWEBTEXT)
    [whole] = _streams(data, [_Side(row, [float(row)], 1 - end if data.eod_mask_loss else 1.0)], "text in full rows")
    if not data.reset_attention_mask:
        return whole
    attended = 1 + 2 * sum((1 - k / row) * (1 - end) ** k for k in range(1, row))
    kind = "mock documents" if data.data_impl == "mock" else "documents as in OpenWebText"
    source = f"{kind}, {1 / end:,.0f} tokens on average, cut into rows"
    return replace(whole, mean=row / (1 + (row - 1) * end), attended=attended, source=source)


def _residues(data: ProteinDataConfig, limit: int) -> tuple[list[float], str]:
    """Residues of proteins, cut, and where the numbers are from."""
    if data.data_impl == "mock":
        first, last = data.mock.min_length, data.mock.max_length
        found, source = [float(n) for n in range(first, last + 1)], f"mock sequences of {first} to {last} residues"
    else:
        median, mean = UNIREF
        deviation = math.sqrt(2 * math.log(mean / median))
        found = [median * math.exp(x) for x in _likely(NormalDist(0.0, deviation))]
        source = f"lengths as in UniRef50 (median {median:.0f}, mean {mean:.0f} residues)"
    return [min(n, limit) for n in found], f"{source}, cut at {limit:,}"


def unmasked(mask_prob: float, span_lambda: float) -> float:
    """Tokens that infilling leaves of each, see data/infilling.py.

    At a token where a span begins, k tokens become one, k of a Poisson distribution; k = 0 adds one before the token.
    """
    none = math.exp(-span_lambda)
    return (1 + mask_prob * none) / (1 + mask_prob * (span_lambda + none - 1))


def _likely(distribution: NormalDist) -> list[float]:
    """Values that are all equally likely."""
    return [distribution.inv_cdf((number + 0.5) / _LIKELY) for number in range(_LIKELY)]


def _product(left: list[float], right: list[float]) -> float:
    """E[n m]."""
    return fmean(n * m for n, m in zip(left, right, strict=True))
