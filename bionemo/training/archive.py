# SPDX-License-Identifier: Apache-2.0
"""Which `.nemo` file a run writes: one of its own, never one that is there from another run or another program."""

import json
import os
from itertools import count
from pathlib import Path

from bionemo.common.files import write_atomic


def own_archive(path: Path, run: str) -> Path:
    """Choose a name for the archive of a run, and record beside it which run writes it.

    Args:
        path: the name asked for.
        run: identity of the run; "" for one that an earlier version began, which recorded nothing.

    Returns:
        The path; with `-v1` or a higher number before its suffix when another run, or something else, has the name.

    Raises:
        OSError: when the record cannot be written.
    """
    for number in count():
        free = path.with_name(f"{path.stem}-v{number}{path.suffix}") if number else path
        record = free.with_name(f".{free.name}.run")
        if not os.path.lexists(free) or _run(record) == run:
            if run:
                write_atomic(record, json.dumps({"run": run}))
            return free
    raise AssertionError


def _run(record: Path) -> str:
    try:
        match json.loads(record.read_text()):
            case {"run": str(run)}:
                return run
    except (OSError, ValueError, RecursionError):
        pass
    return ""
