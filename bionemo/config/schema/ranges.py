# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers, written as the types of fields; `config/typed.py` checks them.

A float without a range has to be finite, an int has to fit into 64 bits.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from bionemo.common.errors import UserError
from bionemo.config.durations import seconds

_INT = 2**63 - 1
_NARROW = 10_000  # a message names both bounds when the upper one is not larger than this


@dataclass(frozen=True)
class Range:
    """Which numbers a field takes.

    Attributes:
        least: the smallest.
        most: the largest.
        above: numbers have to be larger than this; takes the place of `least`.
        below: numbers have to be smaller than this; takes the place of `most`.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float | None = None
    below: float | None = None

    def expected(self, value: float) -> str | None:
        """What would be right in the place of a value; None if it is right itself."""
        if not math.isfinite(value):
            return "a finite number"
        low = value >= self.least if self.above is None else value > self.above
        high = value <= self.most if self.below is None else value < self.below
        if low and high:
            return None
        least = f"at least {_plain(self.least)}" if self.above is None else f"above {_plain(self.above)}"
        most = f"at most {_plain(self.most)}" if self.below is None else f"below {_plain(self.below)}"
        if self.below is None and self.most > _NARROW:
            return most if low else least
        if self.above is not None:
            return f"{least} and {most}"
        return f"from {_plain(self.least)} to {_plain(self.most) if self.below is None else most}"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


@dataclass(frozen=True)
class TimeSpan:
    """Which lengths of time a field takes: no longer than a timedelta can be.

    Attributes:
        zero: whether it may be zero.
    """

    zero: bool = False

    def expected(self, value: object) -> str | None:
        """What would be right in the place of a value; None if it is right itself."""
        try:
            length = seconds("", value)  # type: ignore[arg-type]
        except UserError:
            return "a time: DD:HH:MM:SS, or {hours: 1}"
        return None if length > 0 or (self.zero and length == 0) else "a time above zero"


ANY_INT, ANY_FLOAT = Range(-_INT - 1, _INT), Range()

# ints
Positive = Annotated[int, Range(1, 2**31 - 1)]
NotNegative = Annotated[int, Range(0, 2**31 - 1)]
Unlimited = Annotated[int, Range(-1, 2**31 - 1)]  # -1: without a limit
Steps = Annotated[int, Range(0, 10**15)]
StepLimit = Annotated[int, Range(-1, 10**15)]
Seed = Annotated[int, Range(0, _INT)]
Layers = Annotated[int, Range(1, 10_000)]
LayerCount = Annotated[int, Range(-10_000, 10_000)]  # below 0: from the end
Width = Annotated[int, Range(1, 2**20)]  # of a tensor: hidden size, heads, rows of a batch
Tokens = Annotated[int, Range(1, 2**24)]
Workers = Annotated[int, Range(0, 1024)]  # processes, 0: none beside this one
Processes = Annotated[int, Range(1, 1024)]
Column = Annotated[int, Range(0, 10_000)]
Machines = Annotated[int, Range(1, 100_000)]
Shards = Annotated[int, Range(1, 100_000)]
Devices = Annotated[int, Range(-1, 4096)]  # -1: all
Byte = Annotated[int, Range(0, 255)]
# floats
Finite = Annotated[float, Range()]
PositiveFloat = Annotated[float, Range(above=0)]
NotNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
ShareAboveZero = Annotated[float, Range(above=0, most=1)]
OpenShare = Annotated[float, Range(above=0, below=1)]
ShareBelowOne = Annotated[float, Range(0, below=1)]
# others
Duration = Annotated[str | dict[str, int], TimeSpan()]
DurationOrZero = Annotated[str | dict[str, int], TimeSpan(zero=True)]
DurationText = Annotated[str, TimeSpan(zero=True)]
