# SPDX-License-Identifier: Apache-2.0
"""Logging of a command: notes of this package on the console, messages of dependencies only in log files."""

import atexit
import logging
import os
import sys
import warnings

from bionemo.common.launcher_environment import is_global_rank_zero
from bionemo.common.redaction import LogFilter

_DEPENDENCIES = ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "torch.distributed")


def silence_dependencies() -> None:
    """Keep dependencies from writing to the console; for processes that run a command, not for `import bionemo`.

    Call it before dependencies are imported and again afterwards: NeMo and Lightning add handlers on import.
    """
    warnings.filterwarnings("ignore")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else other ranks print C++ stacks when one rank fails
    if "inline" in os.environ.get("MPLBACKEND", ""):  # a shell command in a notebook, which cannot redraw lines
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich then prints no progress bars
    logging.getLogger("nv_one_logger").setLevel(logging.CRITICAL)  # it warns that telemetry is off
    atexit.unregister(_silence_teardown)
    atexit.register(_silence_teardown)
    for name in _DEPENDENCIES:
        logger = logging.getLogger(name)
        logger.propagate = False
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)


def _silence_teardown() -> None:
    """Discard what extension modules print after the exit handlers: triton 3.9 lists 80 lines of leaked objects."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def log_to_console() -> None:
    """Print warnings of this package on rank 0 as notes of one line; handlers of an earlier run are removed."""
    logger = logging.getLogger("bionemo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_Console())


def log_to_file(handler: logging.Handler) -> None:
    """Also write messages of this package to a log file, including those printed before the file was opened."""
    logger = logging.getLogger("bionemo")
    for console in logger.handlers:
        if isinstance(console, _Console):
            for record in console.records:
                handler.handle(record)
    logger.addHandler(handler)


class _Console(logging.Handler):
    """Prints to the current sys.stderr and keeps the records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(LogFilter())
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if is_global_rank_zero():
            print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)
