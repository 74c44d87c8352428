# SPDX-License-Identifier: Apache-2.0
"""What a command says to its user: once, however many processes it is."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bionemo.cluster.process import speaks_for_all
from bionemo.errors import UserError


def tell(*notes: str) -> None:
    """Say what the user should know."""
    for note in notes:
        if speaks_for_all():
            print(f"note: {note}", file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on stderr: status 1 when the user made a mistake, 130 when it was interrupted."""
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        by_hand = isinstance(error, KeyboardInterrupt)
        if speaks_for_all():
            print("\ninterrupted" if by_hand else f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT if by_hand else 1)
