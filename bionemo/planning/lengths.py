# SPDX-License-Identifier: Apache-2.0
"""Assumed lengths of sequences, which determine the cost of attention; a plan does not read the data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist, fmean

from bionemo.config import schema

UNIREF = (210.0, 278.0)  # median and mean number of residues in UniRef50; the distribution is close to lognormal
ZINC = (43.0, 8.0)  # mean and deviation of the tokens of ZINC15's randomized SMILES; close to normal
_BOS_EOS = 2
_MULTIPLE = 64  # as in data/collate.py
_SAMPLES = 10_000  # lengths that represent a distribution


@dataclass(frozen=True)
class Tokens:
    """Statistics of the tokens that a transformer block reads from a row; a micro-batch consists of rows."""

    row: float  # length of a row; the mean if rows are as long as their sequence
    filled: float  # fraction of the tokens of a row that belong to a sequence
    mean: float  # mean tokens of a sequence, BOS and EOS included
    max_length: int  # tokens of the longest sequence
    attended: float  # mean tokens of the sequence that a token belongs to, E[n^2] / E[n] for sequences of n tokens
    target_fraction: float  # fraction of the tokens of a sequence at which the loss is computed
    source: str  # description of the assumed lengths
    # mean tokens of the encoder's sequence that a decoder's token attends to, E[n m] / E[n]
    cross_attended: float = 0.0
    multiple: int = 1  # padding makes the tokens of a micro-batch a multiple of this

    def count(self, rows: int) -> int:
        """Return the tokens of a micro-batch, padding included."""
        return math.ceil(rows * self.row / self.multiple) * self.multiple

    def unpadded(self, rows: int) -> float:
        """Return the tokens of a micro-batch without padding."""
        return rows * self.row * self.filled

    def targets(self, rows: int) -> float:
        """Return the number of target positions of a micro-batch."""
        return self.unpadded(rows) * self.target_fraction


@dataclass(frozen=True)
class _Side:
    """Samples as one transformer block reads them."""

    max_tokens: int  # length of a packed or padded row
    lengths: list[float]  # equally likely lengths of sequences, in the same order for encoder and decoder
    target_fraction: float  # see Tokens


def estimate_tokens(config: schema.ModelConfig) -> tuple[Tokens, ...]:
    """Return the statistics for each transformer block; packed rows count as full (they are to 98 % and more).

    The lengths of data of another package are unknown: a row counts as one sequence.
    """
    data, row = config.data, config.seq_length
    if isinstance(data, schema.TextDataConfig):  # attention across documents, the upper bound
        sides, source = [_Side(row, [float(row)], 1.0)], "text in full rows"
    elif isinstance(data, schema.MoleculeDataConfig):
        source = f"SMILES of {ZINC[0]:.0f} tokens on average, as in ZINC15, cut at {row - 1}"
        lengths = [min(length, row - 1) for length in _quantiles(NormalDist(*ZINC))]
        kept = unmasked_fraction(data.mask_prob, data.span_lambda) if data.encoder_mask else 1.0
        sides = [_Side(row, [kept * n for n in lengths], 0.0), _Side(row, [n + 1 for n in lengths], 1.0)]
    elif isinstance(data, schema.SpanDataConfig):
        residues, source = _residues(data, row)
        spans = [2 * max(round(n * data.masked_lm_prob), 1) + 1.0 for n in residues]
        sides = [_Side(row, residues, 0.0), _Side(data.seq_length_dec, spans, 1.0)]
    elif isinstance(data, schema.MaskedDataConfig):
        residues, source = _residues(data, row - _BOS_EOS)
        sides = [_Side(row, [n + _BOS_EOS for n in residues], data.modify_percent)]
    else:
        source = f"sequences of {row:,} tokens, because the lengths of {type(data).__name__} are unknown"
        sides = [_Side(row, [float(row)], 0.0)] * isinstance(config, schema.EncoderDecoderConfig)
        sides += [_Side(row, [float(row)], 1.0)]
    return _pack(data, sides, source)


def _pack(data: schema.DataConfig, sides: list[_Side], source: str) -> tuple[Tokens, ...]:
    """Put one sequence into each row, or, with packing, as many as fit on all sides."""
    fractions = zip(*([n / side.max_tokens for n in side.lengths] for side in sides), strict=True)
    sequences = 1 / fmean(map(max, fractions)) if data.packing else 1.0
    dynamic = data.dynamic_padding and not data.packing
    found = []
    for side in sides:
        mean = fmean(side.lengths)
        row = mean if dynamic else side.max_tokens
        found.append(
            Tokens(
                row=row,
                filled=sequences * mean / row,
                mean=mean,
                max_length=math.ceil(max(side.lengths)),
                attended=_mean_product(side.lengths, side.lengths) / mean,
                target_fraction=side.target_fraction,
                source=source,
                cross_attended=0.0 if side is sides[0] else _mean_product(side.lengths, sides[0].lengths) / mean,
                multiple=_MULTIPLE if dynamic else 1,
            )
        )
    return tuple(found)


def _residues(data: schema.ProteinDataConfig, limit: int) -> tuple[list[float], str]:
    """Return equally likely lengths of proteins in residues, cut at `limit`, and a description."""
    lengths: Iterable[float]
    if data.data_impl == "mock":
        first, last = data.mock.min_length, data.mock.max_length
        lengths, source = map(float, range(first, last + 1)), f"mock sequences of {first} to {last} residues"
    else:
        median, mean = UNIREF
        lognormal = NormalDist(0.0, math.sqrt(2 * math.log(mean / median)))
        lengths = (median * math.exp(x) for x in _quantiles(lognormal))
        source = f"lengths as in UniRef50 (median {median:.0f}, mean {mean:.0f} residues)"
    return [min(n, limit) for n in lengths], f"{source}, cut at {limit:,}"


def unmasked_fraction(mask_prob: float, span_lambda: float) -> float:
    """Return the tokens that infilling leaves per input token, see data/molecules/infilling.py.

    Where a span begins, k ~ Poisson(span_lambda) tokens become one; k = 0 inserts a token.
    """
    empty = math.exp(-span_lambda)
    return (1 + mask_prob * empty) / (1 + mask_prob * (span_lambda + empty - 1))


def _quantiles(distribution: NormalDist) -> list[float]:
    return [distribution.inv_cdf((number + 0.5) / _SAMPLES) for number in range(_SAMPLES)]


def _mean_product(left: list[float], right: list[float]) -> float:
    return fmean(n * m for n, m in zip(left, right, strict=True))
