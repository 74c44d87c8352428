# SPDX-License-Identifier: Apache-2.0
"""From raw downloads to shards that train. Each kind of data set is a module with one function, `prepare`."""

import logging
import sys

from bionemo.config.schema import PreparationConfig
from bionemo.config.targets import resolve


class _Console(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Whoever read what is said may have left, as `head` does: the work goes on."""


def prepare(job: PreparationConfig) -> None:
    """Do what a job asks for, and tell on standard output what became of the records.

    Raises:
        UserError: at anything the user can mend.
    """
    logger = logging.getLogger(__name__)
    console = _Console(sys.stdout)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(console)
    try:
        resolve(job._target_)(job)
    finally:
        logger.removeHandler(console)
        logger.propagate = True
