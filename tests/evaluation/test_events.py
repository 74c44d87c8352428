# SPDX-License-Identifier: Apache-2.0
"""Event files are read as TensorBoard's own reader reads them."""

import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from bionemo.common.errors import UserError
from bionemo.evaluation.events import read_scalars
from bionemo.evaluation.run_report import Run

STEPS = [0, 1, 2, 127, 128, 129, 16_383, 16_384, 2**21, 2**33]  # around the sizes of varints


def written(directory: Path, steps: list[int]) -> Path:
    """Write three metrics, two of which have names of equal length, a histogram and a text."""
    generator = np.random.default_rng(0)
    writer = EventFileWriter(str(directory))
    for step in steps:
        for tag in ("loss", "rate", "a longer name/1"):
            number = float(generator.normal()) if step % 3 else 0.0
            value = Summary.Value(tag=tag, simple_value=math.inf if step == 2 else number)
            writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value])))
        histogram = Summary.Value(tag="weights", histo=HistogramProto(num=step))
        writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[histogram])))
    writer.close()
    return next(directory.glob("events.out.tfevents.*"))


def test_the_reader_of_tensorboard_gives_the_same(tmp_path: Path) -> None:
    written(tmp_path, STEPS)
    curves = Run(tmp_path, "run").curves
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert set(curves) == set(events.Tags()["scalars"]) == {"loss", "rate", "a longer name/1"}
    for tag, (steps, values) in curves.items():
        assert steps.tolist() == [event.step for event in events.Scalars(tag)] == STEPS
        np.testing.assert_array_equal(values, [event.value for event in events.Scalars(tag)])


def test_of_events_of_one_step_the_last_counts(tmp_path: Path) -> None:
    written(tmp_path, [5, 300, 5])
    steps, values = Run(tmp_path, "run").curves["loss"]
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    assert steps.tolist() == [5, 300]
    assert values[0] == events.Scalars("loss")[2].value != events.Scalars("loss")[0].value


@pytest.mark.parametrize("removed", [1, 15, 40])
def test_an_incomplete_record_ends_the_file(tmp_path: Path, removed: int) -> None:
    path = written(tmp_path, STEPS)
    complete = sum(len(steps) for _, steps, _ in read_scalars(path))
    path.write_bytes(path.read_bytes()[:-removed])  # of the last histogram
    assert sum(len(steps) for _, steps, _ in read_scalars(path)) == complete == 30


def test_a_damaged_file(tmp_path: Path) -> None:
    path = written(tmp_path, STEPS)
    content = bytearray(path.read_bytes())
    content[12] = 0xFF  # the first byte of the first event
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} is damaged .*: move it away$"):
        list(read_scalars(path))
