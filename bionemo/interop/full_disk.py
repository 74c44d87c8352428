# SPDX-License-Identifier: Apache-2.0
"""Log files and TensorBoard's event files that cannot be written any more, as on a full disk, do not end a run.

By themselves, `logging` prints a traceback for every message, and TensorBoard's thread prints one and ends training.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.summary.writer.record_writer import RecordWriter

log = logging.getLogger(__name__)
_told: set[Path] = set()  # directories
_log_error = logging.FileHandler.handleError


def tolerate() -> None:
    """Say once for each directory that files in it are incomplete from now on; call it at the start of a run."""
    _told.clear()
    logging.FileHandler.handleError = _of_log_file  # type: ignore[method-assign,assignment]
    if not hasattr(RecordWriter, "failed"):
        RecordWriter.failed = False
        for name in ("write", "flush", "close"):
            setattr(RecordWriter, name, _tolerant(getattr(RecordWriter, name)))


def _of_log_file(handler: logging.FileHandler, record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, OSError):
        _tell(Path(handler.baseFilename), error)
    else:
        _log_error(handler, record)


def _tolerant(method: Callable[..., Any]) -> Callable[..., Any]:
    def tolerant(writer: Any, *arguments: Any) -> Any:
        if writer.failed:  # what follows half a record cannot be read
            return None
        try:
            return method(writer, *arguments)
        except OSError as error:
            writer.failed = True
            _tell(Path(os.fsdecode(writer._writer.filename)), error)

    return tolerant


def _tell(file: Path, error: OSError) -> None:
    if file.parent not in _told:
        _told.add(file.parent)
        log.warning(
            "%s cannot be written (%s): logs in this directory are incomplete from here on",
            file, error.strerror or error,
        )  # fmt: skip
