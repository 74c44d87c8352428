# SPDX-License-Identifier: Apache-2.0
"""Field types with a range of permitted values, checked by `config/schema_reader.py`.

Without a range, a float must be finite and an int must fit 64 bits.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from bionemo.common.errors import UserError

_MAX_INT64 = 2**63 - 1
_MAX_SHOWN = 10_000  # messages name the upper bound only if it is not larger than this


def duration_in_seconds(key: str, duration: str | dict[str, int]) -> float:
    """Convert `DD:HH:MM:SS`, or keyword arguments of `datetime.timedelta`, to seconds.

    Raises:
        UserError: if it is neither; names the key.
    """
    try:
        if isinstance(duration, str):
            days, hours, minutes, seconds = map(int, duration.split(":"))
            return timedelta(days, seconds, minutes=minutes, hours=hours).total_seconds()
        return timedelta(**duration).total_seconds()
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{key}={duration} is not a duration: write DD:HH:MM:SS, or {{hours: 1}}") from error


@dataclass(frozen=True)
class Range:
    """A range of numbers; the bounds `above` and `below` are exclusive and replace `minimum` and `maximum`."""

    minimum: float = -math.inf
    maximum: float = math.inf
    above: float | None = None
    below: float | None = None

    def expected(self, value: float) -> str | None:
        """Describe the range if the value is outside; None if it is inside."""
        if not math.isfinite(value):
            return "a finite number"
        low = value >= self.minimum if self.above is None else value > self.above
        high = value <= self.maximum if self.below is None else value < self.below
        if low and high:
            return None
        minimum = f"at least {_format(self.minimum)}" if self.above is None else f"above {_format(self.above)}"
        maximum = f"at most {_format(self.maximum)}" if self.below is None else f"below {_format(self.below)}"
        if self.below is None and self.maximum > _MAX_SHOWN:
            return maximum if low else minimum
        if self.above is not None:
            return f"{minimum} and {maximum}"
        return f"from {_format(self.minimum)} to {_format(self.maximum) if self.below is None else maximum}"


def _format(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


@dataclass(frozen=True)
class DurationRange:
    """Durations above zero that fit `datetime.timedelta`; zero is permitted if `allow_zero`."""

    allow_zero: bool = False

    def expected(self, value: str | dict[str, int]) -> str | None:
        """Describe the range if the value is outside; None if it is inside."""
        try:
            seconds = duration_in_seconds("", value)
        except UserError:
            return "a duration: DD:HH:MM:SS, or {hours: 1}"
        return None if seconds > 0 or (self.allow_zero and seconds == 0) else "a duration above zero"


ANY_INT, ANY_FLOAT = Range(-_MAX_INT64 - 1, _MAX_INT64), Range()

PositiveInt = Annotated[int, Range(1, 2**31 - 1)]
NonNegativeInt = Annotated[int, Range(0, 2**31 - 1)]
IntOrUnlimited = Annotated[int, Range(-1, 2**31 - 1)]  # -1: unlimited
StepCount = Annotated[int, Range(0, 10**15)]
StepLimit = Annotated[int, Range(-1, 10**15)]  # -1: unlimited
Seed = Annotated[int, Range(0, _MAX_INT64)]
LayerCount = Annotated[int, Range(1, 10_000)]
SignedLayerCount = Annotated[int, Range(-10_000, 10_000)]
Dimension = Annotated[int, Range(1, 2**20)]  # of a tensor: hidden size, heads, batch size
TokenCount = Annotated[int, Range(1, 2**24)]
WorkerCount = Annotated[int, Range(0, 1024)]  # 0: no process besides the main one
ProcessCount = Annotated[int, Range(1, 1024)]
ColumnIndex = Annotated[int, Range(0, 10_000)]  # from 0
NodeCount = Annotated[int, Range(1, 100_000)]
ShardCount = Annotated[int, Range(1, 100_000)]
DeviceCount = Annotated[int, Range(-1, 4096)]  # -1: all
Byte = Annotated[int, Range(0, 255)]

PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
FractionAboveZero = Annotated[float, Range(above=0, maximum=1)]
FractionBelowOne = Annotated[float, Range(0, below=1)]
FractionBetween = Annotated[float, Range(above=0, below=1)]

Duration = Annotated[str | dict[str, int], DurationRange()]  # DD:HH:MM:SS, or {hours: 4}
DurationOrZero = Annotated[str | dict[str, int], DurationRange(allow_zero=True)]
DurationText = Annotated[str, DurationRange(allow_zero=True)]
