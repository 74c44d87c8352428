# SPDX-License-Identifier: Apache-2.0
"""Prepare raw data for training, as CSV shards or indexed tokens. Each kind of data has a module with `prepare`."""

import logging
import sys

from bionemo.config.schema import PreparationConfig
from bionemo.config.targets import import_target


class _ConsoleHandler(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore write errors: the reader of standard output may have exited, as `head` does."""


def prepare(job: PreparationConfig) -> None:
    """Run a preparation and log its progress and record counts to standard output.

    Raises:
        UserError: for every problem that the user can fix.
    """
    logger = logging.getLogger("bionemo")
    console = _ConsoleHandler(sys.stdout)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(console)
    try:
        import_target(job._target_)(job)
    finally:
        logger.removeHandler(console)
        logger.propagate = True
