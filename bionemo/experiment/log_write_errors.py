# SPDX-License-Identifier: Apache-2.0
"""Log files and TensorBoard event files that cannot be written, such as on a full disk, do not end a run.

By default `logging` prints a traceback for every message, and TensorBoard's thread raises an error that ends training.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.summary.writer.record_writer import RecordWriter

log = logging.getLogger(__name__)
_reported: set[Path] = set()  # directories
_handle_error = logging.FileHandler.handleError


def tolerate_write_errors() -> None:
    """Report the first error in each directory and drop later output; call it when a run starts.

    This patches `logging.FileHandler` and TensorBoard's `RecordWriter` for the rest of the process: NeMo and Lightning
    create their instances, and threads write after training has ended.
    """
    _reported.clear()
    logging.FileHandler.handleError = _handle_file_error  # type: ignore[method-assign,assignment]
    if not hasattr(RecordWriter, "failed"):
        RecordWriter.failed = False
        for name in ("write", "flush", "close"):
            setattr(RecordWriter, name, _ignore_write_errors(getattr(RecordWriter, name)))


def _handle_file_error(handler: logging.FileHandler, record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, OSError):
        _report(Path(handler.baseFilename), error)
    else:
        _handle_error(handler, record)


def _ignore_write_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(writer: Any, *arguments: Any) -> Any:
        if writer.failed:  # nothing after an incomplete record can be read
            return None
        try:
            return method(writer, *arguments)
        except OSError as error:
            writer.failed = True
            _report(Path(os.fsdecode(writer._writer.filename)), error)

    return call


def _report(file: Path, error: OSError) -> None:
    if file.parent not in _reported:
        _reported.add(file.parent)
        reason = error.strerror or error
        log.warning("%s cannot be written (%s): logs in this directory are incomplete from now on", file, reason)
