#!/usr/bin/env bash
# After a resume TensorBoard keeps the values of steps that were trained again, also with purge_orphaned_data=True.
#
# Package:   tensorboard 2.21.0
# Expected:  A run logs steps 1 to 4, is killed, and continues after its checkpoint of step 2 with a new event file in
#            the same directory, as Lightning's and NeMo's loggers do. purge_orphaned_data=True, the default, discards
#            "events that were orphaned by a restart": one value for each step.
# What is:   Steps 3 and 4 have two values, in the order of the files; a search for the lowest loss finds abandoned
#            values. Events are discarded only behind a SessionLog.START, which torch's SummaryWriter writes for
#            purge_step=STEP only; Lightning passes none unless it is told to.
# Met by:    Runs that are requeued: curves go back, and reports read values of weights that no longer exist. Keep the
#            last value of each step, as bionemo report does (evaluation/run_report.py).
# Source:    tensorboard, backend/event_processing/event_accumulator.py, EventAccumulator._MaybePurgeOrphanedData.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

python_packages tensorboard tensorboard==2.21.0
"$work/tensorboard/bin/python" - "$work" >"$work/seen" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write(directory, start, losses, session_start=None):
    """Write a file of one start; `start` is the second at which it starts."""
    writer = EventFileWriter(directory, filename_suffix=f".start{start}")
    if session_start is not None:
        log = SessionLog(status=SessionLog.START)
        writer.add_event(Event(step=session_start, wall_time=start, session_log=log))
    for step, loss in losses.items():
        value = Summary.Value(tag="val_loss", simple_value=loss)
        writer.add_event(Event(step=step, wall_time=start + step, summary=Summary(value=[value])))
    writer.close()


for name, session_start in (("as loggers write them", None), ("with SessionLog.START", 3)):
    directory = f"{sys.argv[1]}/{name}"
    write(directory, 100, {1: 4.0, 2: 3.0, 3: 0.5, 4: 2.0})
    write(directory, 200, {3: 2.5, 4: 2.25, 5: 1.5}, session_start)
    events = EventAccumulator(directory, purge_orphaned_data=True).Reload().Scalars("val_loss")
    lowest = min(events, key=lambda event: event.value)
    print(f"{name}: {[(event.step, event.value) for event in events]}, lowest at step {lowest.step}")
PY
compare <<'END'
as loggers write them: [(1, 4.0), (2, 3.0), (3, 0.5), (4, 2.0), (3, 2.5), (4, 2.25), (5, 1.5)], lowest at step 3
with SessionLog.START: [(1, 4.0), (2, 3.0), (3, 2.5), (4, 2.25), (5, 1.5)], lowest at step 5
END
