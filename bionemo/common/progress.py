# SPDX-License-Identifier: Apache-2.0
"""Progress of long operations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress(description: str, total: int | None, start: int = 0) -> Iterator[Callable[[int], object]]:
    """Show on standard error how many of `total` bytes (None: unknown) are processed; `start` were processed earlier.

    The bar is updated once per minute if standard error is not a terminal. The description is a verb and its object,
    such as "reading uniref50.fasta". Yields a function to call with the number of bytes that were processed since the
    last call.
    """
    interval = 0.1 if sys.stderr.isatty() else 60.0
    with tqdm(
        desc=description, total=total, initial=start, unit="B", unit_scale=True, leave=False, mininterval=interval,
        delay=interval,
    ) as bar:  # fmt: skip
        yield bar.update
