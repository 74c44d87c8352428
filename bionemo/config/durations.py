# SPDX-License-Identifier: Apache-2.0
"""Lengths of time, as configurations write them."""

from datetime import timedelta

from bionemo.common.errors import UserError


def seconds(key: str, interval: str | dict[str, int]) -> float:
    """Read `DD:HH:MM:SS`, or the arguments of a timedelta.

    Raises:
        UserError: when it is neither; `key` is named.
    """
    try:
        if isinstance(interval, str):
            days, hours, minutes, rest = map(int, interval.split(":"))
            return timedelta(days, rest, minutes=minutes, hours=hours).total_seconds()
        return timedelta(**interval).total_seconds()
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{key}={interval} is not a time: write DD:HH:MM:SS, or {{hours: 1}}") from error
