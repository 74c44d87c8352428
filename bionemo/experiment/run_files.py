# SPDX-License-Identifier: Apache-2.0
"""Files of a run in its log directory.

When a run starts, the files of earlier runs are moved to `run_0`, `run_1` and so on. Other files stay, because the
directory may be shared or the working directory. Every start therefore records which files it writes.
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
_NEMO_LOGS = r"cmd-args\.log|nemo_error_log\.txt|lightning_logs\.txt|nemo_log_globalrank-\d+_localrank-\d+\.txt"
_LOGS = rf"{_NEMO_LOGS}|git-info\.log|(config|hparams)\.yaml|run\.json|loss_curve\.png"


def read_run_id(directory: Path) -> str | None:
    """Return the ID of the run that last started in a log directory; None if there is no record."""
    record = _read_record(directory)
    return record[0] if record else None


def move_old_files(directory: Path, run: str | None, copies: Iterable[str] = ()) -> None:
    """Move the files of earlier runs to the next `run_N`, then record the start of this run.

    `run` is the ID of the run; None: it writes no checkpoints, and the recorded ID stays. `copies` are the
    paths of files that the run copies into the directory.

    Raises:
        UserError: if a file that no run has written has the name of a file that this run writes.
        OSError: if the directory cannot be written.
    """
    new = {Path(path).name for path in copies}
    files = [path for path in directory.iterdir() if path.is_file()]
    last_run, copied = _read_record(directory) or ("", None)
    # without a record, logs of NeMo are those of BioNeMo v1
    has_runs = copied is not None or any(re.fullmatch(_NEMO_LOGS, path.name) for path in files)
    old = []
    for path in files:
        is_log = re.fullmatch(_LOGS, path.name) is not None
        if (is_log and has_runs) or path.name in (copied or ()):
            old.append(path)
        elif is_log or path.name in new:
            raise UserError(
                f"{path} was not written by a run, but this run would replace it: move it away, or choose another "
                "exp_manager.exp_dir"
            )
    if old:
        archive = _next_directory(directory)
        archive.mkdir()
        for path in old:
            os.rename(path, archive / path.name)
    record = {"run": last_run if run is None else run, "files": sorted(new)}
    write_atomic(directory / RECORD, json.dumps(record))


@contextmanager
def prepare_log_directory(directory: Path, run: str | None, copies: Iterable[str] = ()) -> Iterator[None]:
    """Call `move_old_files`; delete the logs of this run if an OSError ends the block."""
    move_old_files(directory, run, copies)
    try:
        yield
    except OSError:
        for path in directory.iterdir():
            if re.fullmatch(_LOGS, path.name):
                path.unlink(missing_ok=True)
        raise


def _next_directory(directory: Path) -> Path:
    number = sum(path.is_dir() for path in directory.glob("run_*"))
    while os.path.lexists(free := directory / f"run_{number}"):
        number += 1
    return free


def _read_record(directory: Path) -> tuple[str, set[str]] | None:
    """Return the ID of the run and the names of the files that it copied."""
    try:
        match json.loads((directory / RECORD).read_text()):
            case {"run": str(run), "files": list(files)}:
                return run, {name for name in files if isinstance(name, str) and Path(name).name == name}
    except (OSError, ValueError, RecursionError):
        pass
    return None
