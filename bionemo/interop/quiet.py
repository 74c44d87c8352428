# SPDX-License-Identifier: Apache-2.0
"""A console for the user: what dependencies have to say goes to the log files, or nowhere."""

import logging
import os
import sys
import warnings

from bionemo.common.launcher_environment import speaks_for_all
from bionemo.common.redaction import LogFilter

_TALKATIVE = ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "torch.distributed")


def quiet_dependencies() -> None:
    """Silence the console of everything but us; call it before anything heavy is imported, and again afterwards.

    NeMo and Lightning put handlers in place when they are imported, hence the second call.
    """
    warnings.filterwarnings("ignore")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else the end of one rank is a wall of frames from others
    if "inline" in os.environ.get("MPLBACKEND", ""):  # behind `!` in a notebook: a terminal that cannot redraw a line
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich then draws no bars
    logging.getLogger("nv_one_logger").setLevel(logging.CRITICAL)  # telemetry that is off, and says so
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        logger.propagate = False
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)


def our_messages_to_console() -> None:
    """Show our own warnings, one line each, from the first rank alone; begin a run's messages anew."""
    logger = logging.getLogger("bionemo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_Console())


def our_messages_to(file: logging.Handler) -> None:
    """Write our messages to a log file too, those from before it was there included."""
    logger = logging.getLogger("bionemo")
    for console in logger.handlers:
        if isinstance(console, _Console):
            for record in console.shown:
                file.handle(record)
    logger.addHandler(file)


class _Console(logging.Handler):
    """Writes to whatever stderr is at the time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(LogFilter())
        self.shown: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.shown.append(record)
        if speaks_for_all():
            print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)
