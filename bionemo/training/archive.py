# SPDX-License-Identifier: Apache-2.0
"""Export of a run's weights as a `.nemo` file, without replacing files of other runs or programs."""

import json
import logging
import os
from itertools import count
from pathlib import Path

from bionemo.checkpoint import Checkpoint
from bionemo.common.files import write_atomic
from bionemo.interop.convert import export_nemo
from bionemo.interop.nemo_models import find_nemo_model

log = logging.getLogger(__name__)


def export_archive(checkpoint: Path, path: Path, run_id: str) -> bool:
    """Write the weights of a checkpoint as a `.nemo` file; log a warning if its model has no `.nemo` format.

    Args:
        checkpoint: the checkpoint.
        path: preferred path of the file; `-v1` is inserted if another run or program uses it.
        run_id: ID of the run.

    Returns:
        Whether the model has a `.nemo` format.

    Raises:
        UserError: if the checkpoint is damaged, or the file cannot be written.
    """
    config = Checkpoint(checkpoint).config
    if find_nemo_model(config) is None:
        log.warning(
            "no .nemo file is written, because models of the class %s have no .nemo format: use the checkpoint",
            config.get("_target_"),
        )
        return False
    export_nemo(checkpoint, _own_archive(path, run_id))
    return True


def _own_archive(path: Path, run_id: str) -> Path:
    """Return a path that no other run or program uses, and record next to it which run writes it.

    `-v1` or a higher number is inserted before the suffix if needed. `run_id` is "" for runs of versions that recorded
    none.

    Raises:
        OSError: if the record cannot be written.
    """
    for number in count():
        candidate = path.with_name(f"{path.stem}-v{number}{path.suffix}") if number else path
        record = candidate.with_name(f".{candidate.name}.run")
        if not os.path.lexists(candidate) or _read_record(record) == run_id:
            if run_id:
                write_atomic(record, json.dumps({"run": run_id}))
            return candidate
    raise AssertionError


def _read_record(record: Path) -> str:
    try:
        match json.loads(record.read_text()):
            case {"run": str(run_id)}:
                return run_id
    except (OSError, ValueError, RecursionError):
        pass
    return ""
