# SPDX-License-Identifier: Apache-2.0
"""Progress of long operations: a bar with the remaining time on a terminal, one log line per minute elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)
_lock = Lock()
_LOG_INTERVAL = 60.0  # seconds


def progress(description: str, total: int | None, start: int = 0) -> AbstractContextManager[Callable[[int], object]]:
    """Show how many of `total` bytes (None: unknown) are processed; `start` were processed earlier.

    The description is a verb and its object, such as "reading uniref50.fasta". Yields a function to call with the
    number of bytes that were processed since the last call.
    """
    return (_show_bar if sys.stderr.isatty() else _log_lines)(description, total, start)


@contextmanager
def _show_bar(description: str, total: int | None, start: int) -> Iterator[Callable[[int], object]]:
    bars = _bars()
    with _lock:
        bars.start()  # no effect if other bars are already visible
        task = bars.add_task(description, total=total, completed=start)
    try:
        yield lambda count: bars.advance(task, count)
    finally:
        with _lock:
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()


@cache
def _bars() -> "Progress":
    """Return the display of all bars; several threads may show theirs at the same time."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


@contextmanager
def _log_lines(description: str, total: int | None, start: int) -> Iterator[Callable[[int], object]]:
    begin = logged = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, logged
        done += count
        now = time.monotonic()
        if now - logged >= _LOG_INTERVAL:
            logged = now
            speed = done / (now - begin)
            of_total = f" of {total / 1e6:,.0f}" if total else ""
            remaining = f", {(total - start - done) / speed / 60:.0f} min left" if total and speed else ""
            megabytes = f"{(start + done) / 1e6:,.0f}{of_total} MB"
            log.info("%s: %s, %.0f MB/s%s", description, megabytes, speed / 1e6, remaining)

    yield advance
