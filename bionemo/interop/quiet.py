# SPDX-License-Identifier: Apache-2.0
"""A console for the user: what dependencies have to say goes to the log files, or nowhere."""

import logging
import sys
import warnings

from bionemo.config import is_rank_zero

_TALKATIVE = ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "torch.distributed")


def quiet_dependencies() -> None:
    """Silence the console of everything but us; call it before anything heavy is imported, and again afterwards.

    NeMo and Lightning put handlers in place when they are imported, hence the second call.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("nv_one_logger").setLevel(logging.CRITICAL)  # telemetry that is off, and says so
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        logger.propagate = False
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)


def our_messages_to_console() -> None:
    """Show our own warnings, one line each, from the first rank alone."""
    logger = logging.getLogger("bionemo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())


class _Console(logging.Handler):
    """Writes to whatever stderr is at the time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        if is_rank_zero():
            print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)
