# SPDX-License-Identifier: Apache-2.0
"""Scalars in TensorBoard's event files, of which a long run has millions.

A file is a sequence of records: size (8 bytes), checksum (4), an `Event` of protocol buffers, checksum (4).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bionemo.common.errors import UserError

_TIME, _VALUE = 9, 4  # bytes of an event at its begin and at its end: with the tag of the field; a float


def read_scalars(path: Path) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    """Yield tags with steps and values, a tag several times; the values of one step are in the order of the file.

    The events of a metric differ only in time, step and value. So all events of a size are compared with the first of
    them as bytes, and only that one is parsed. An incomplete record ends the file; other events are left out.

    Raises:
        UserError: if the file is damaged.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    data, position, starts = path.read_bytes(), 0, dict[int, list[int]]()
    read_size = struct.Struct("<Q").unpack_from
    while position + 12 <= len(data) and position + 16 + (size := read_size(data, position)[0]) <= len(data):
        starts.setdefault(size, []).append(position + 12)
        position += size + 16
    for size, found in starts.items():
        events = sliding_window_view(np.frombuffer(data, np.uint8), size)[found]
        while len(events):
            try:
                first = Event.FromString(events[0].tobytes())
            except DecodeError as error:
                raise UserError(f"{path} is damaged ({error}): move it away") from error
            (value, *others) = [*first.summary.value] or [None]
            if value is None or others or value.WhichOneof("value") != "simple_value" or value.HasField("metadata"):
                events = events[1:]
                continue
            digits = -(-first.step.bit_length() // 7)  # bytes of the step, a varint after its tag; no field for step 0
            step, rest = np.split(events[:, _TIME:-_VALUE], [digits and digits + 1], axis=1)
            same = (step >> 7 == step[0] >> 7).all(1) & (rest == rest[0]).all(1) & (step[:, :1] == step[0, :1]).all(1)
            steps = ((step[same, 1:] & 127).astype(np.int64) << 7 * np.arange(digits)).sum(1)
            yield value.tag, steps, events[same, -_VALUE:].copy().view("<f4")[:, 0].astype(np.float64)
            events = events[~same]
