# SPDX-License-Identifier: Apache-2.0
"""Files of earlier runs in a log directory: they move to `run_0`, `run_1` and so on, and nothing else moves.

A log directory may hold other files, and may be the working directory. So every start records which files it writes.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic

RECORD = ".bionemo-run.json"
_NAMED_BY_NEMO = r"cmd-args\.log|nemo_error_log\.txt|lightning_logs\.txt|nemo_log_globalrank-\d+_localrank-\d+\.txt"
_LOGS = rf"{_NAMED_BY_NEMO}|git-info\.log|(config|hparams)\.yaml|loss_curve\.png"


def recorded_run(directory: Path) -> str | None:
    """The identity of the run that last started in a log directory; None when there is no record."""
    record = _record(directory)
    return record[0] if record else None


def set_aside(directory: Path, run: str | None, copies: Iterable[str] = ()) -> None:
    """Move the files of earlier runs to the next `run_N`, then record this start.

    Args:
        directory: the log directory.
        run: identity of the run; None: one that writes no checkpoints, which leaves the recorded identity.
        copies: paths of files that this start copies into the directory.

    Raises:
        UserError: when a file that no run has written has the name of one that this start writes.
        OSError: when the directory cannot be written.
    """
    new = {Path(path).name for path in copies}
    files = [path for path in directory.iterdir() if path.is_file()]
    record = _record(directory)
    known = record[1] if record else set()
    before_records = any(re.fullmatch(_NAMED_BY_NEMO, path.name) for path in files)  # of v1 or an earlier version
    ours = _LOGS if record or before_records else r"(?!)"
    old = [path for path in files if path.name in known or re.fullmatch(ours, path.name)]
    for path in files:
        if path not in old and (path.name in new or re.fullmatch(_LOGS, path.name)):
            raise UserError(
                f"{path} was not written by a run, which would replace it: move it away, or choose another "
                "exp_manager.exp_dir"
            )
    if old:
        place = _next(directory)
        place.mkdir()
        for path in old:
            os.rename(path, place / path.name)
    last = record[0] if record else ""
    write_atomic(directory / RECORD, json.dumps({"run": last if run is None else run, "files": sorted(new)}))


@contextmanager
def started_logs(directory: Path, run: str | None, copies: Iterable[str] = ()) -> Iterator[None]:
    """Move files of earlier runs away as `set_aside`; delete the logs of this one if an OSError ends the block."""
    set_aside(directory, run, copies)
    try:
        yield
    except OSError:
        for path in directory.iterdir():
            if re.fullmatch(_LOGS, path.name):
                path.unlink(missing_ok=True)
        raise


def _next(directory: Path) -> Path:
    number = sum(path.is_dir() for path in directory.glob("run_*"))
    while os.path.lexists(place := directory / f"run_{number}"):
        number += 1
    return place


def _record(directory: Path) -> tuple[str, set[str]] | None:
    """The identity of the run, and the names of the files that it copied."""
    try:
        match json.loads((directory / RECORD).read_text()):
            case {"run": str(run), "files": list(files)}:
                return run, {name for name in files if isinstance(name, str) and Path(name).name == name}
    except (OSError, ValueError, RecursionError):
        pass
    return None
