# SPDX-License-Identifier: Apache-2.0
"""Scalars in TensorBoard event files, of which the last may still be written or be truncated.

A file is a sequence of records: the length (8 bytes), its checksum (4), a serialized `Event` and its checksum (4).
"""

import struct
from array import array
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.common.regular import open_regular

_LENGTH, _BEFORE, _AROUND = struct.Struct("<Q"), 12, 16
PATTERN = "events.out.tfevents.*"


@dataclass(frozen=True)
class Scalars:
    """Values of a metric in the order in which they were written; all arrays are [N]."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times: NDArray[np.float64]  # seconds since 1970


@dataclass(frozen=True)
class EventFile:
    """Content of an event file."""

    path: Path
    scalars: dict[str, Scalars]
    problem: str | None  # why the rest of the file was not read

    @property
    def begin(self) -> float:
        """Time of the first value, in seconds since 1970."""
        return min((float(each.times[0]) for each in self.scalars.values()), default=0.0)

    @property
    def end(self) -> float:
        """Time of the last value."""
        return max((float(each.times[-1]) for each in self.scalars.values()), default=0.0)


def read_events(path: Path) -> EventFile:
    """Read all complete records.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a regular file.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    with open_regular(path) as file:
        content = file.readall()  # type: ignore[attr-defined]
    columns: dict[str, tuple[array[int], array[float], array[float]]] = defaultdict(
        lambda: (array("q"), array("d"), array("d"))
    )
    position, problem, parse, unpack = 0, None, Event.FromString, _LENGTH.unpack_from
    while position < len(content):
        begin = position + _BEFORE
        length = unpack(content, position)[0] if begin <= len(content) else len(content)
        position = begin + length + _AROUND - _BEFORE
        if position > len(content):
            problem = "the last record is incomplete"
            break
        try:
            event = parse(content[begin : begin + length])
        except DecodeError:
            problem = f"the record at byte {begin - _BEFORE:,} is damaged"
            break
        for value in event.summary.value:
            if value.HasField("simple_value"):
                steps, values, times = columns[value.tag]
                steps.append(event.step)
                values.append(value.simple_value)
                times.append(event.wall_time)
    scalars = {
        tag: Scalars(np.array(steps, np.int64), np.array(values, np.float64), np.array(times, np.float64))
        for tag, (steps, values, times) in columns.items()
    }
    return EventFile(path, scalars, problem)


def join(parts: list[Scalars]) -> Scalars:
    """Join the values of several files, the oldest first; of a step that was trained again, keep the last value."""
    steps, values, times = (
        np.concatenate([getattr(each, name) for each in parts]) for name in ("steps", "values", "times")
    )
    last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
    return Scalars(steps[last], values[last], times[last])


def downsample(scalars: Scalars, buckets: int) -> Scalars:
    """Keep the smallest and the largest value of each of `buckets` ranges of points, and all values not finite."""
    if len(scalars.steps) <= 2 * buckets:
        return scalars
    edges = np.linspace(0, len(scalars.values), buckets + 1).astype(int)[:-1]
    ranges = np.repeat(np.arange(buckets), np.diff([*edges, len(scalars.values)]))
    finite = np.isfinite(scalars.values)
    order = np.lexsort((np.where(finite, scalars.values, 0), ranges))
    kept = np.unique(
        [*order[edges], *order[[*(edges[1:] - 1), -1]], len(scalars.values) - 1, *np.flatnonzero(~finite)[:buckets]]
    )
    return Scalars(scalars.steps[kept], scalars.values[kept], scalars.times[kept])
