# SPDX-License-Identifier: Apache-2.0
"""How far a long job is: a bar with the time left for those who look, a line a minute in a log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)
_lock = Lock()
_EVERY = 60.0  # seconds between lines of a log


@contextmanager
def progress(what: str, total: int | None, start: int = 0) -> Iterator[Callable[[int], object]]:
    """Show how many bytes of `total` are done.

    Args:
        what: a verb and its object, as in "reading uniref50.fasta".
        total: bytes; None when nobody knows.
        start: bytes done before.

    Yields:
        A function to be told of every further stretch of bytes.
    """
    with (_bar if sys.stderr.isatty() else _lines)(what, total, start) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int | None, start: int) -> Iterator[Callable[[int], object]]:
    bars = _bars()
    with _lock:
        bars.start()  # does nothing when others are shown already
        task = bars.add_task(what, total=total, completed=start)
    try:
        yield lambda count: bars.advance(task, count)
    finally:
        with _lock:
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()


@cache
def _bars() -> "Progress":
    """All bars there are, one below the other: threads may show theirs at the same time."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


@contextmanager
def _lines(what: str, total: int | None, start: int) -> Iterator[Callable[[int], object]]:
    begun = told = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        now = time.monotonic()
        if now - told >= _EVERY:
            told = now
            speed = done / (now - begun)
            left = f" of {total / 1e6:,.0f}" if total else ""
            ready = f", {(total - start - done) / speed / 60:.0f} min left" if total and speed else ""
            log.info("%s: %s%s MB, %.0f MB/s%s", what, f"{(start + done) / 1e6:,.0f}", left, speed / 1e6, ready)

    yield advance
