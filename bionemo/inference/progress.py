# SPDX-License-Identifier: Apache-2.0
"""Progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]
"""Called with the number of items that were finished since the last call."""


def no_progress(count: int) -> None:
    """Show nothing."""


@contextmanager
def progress_bar(description: str, total: int, unit: str) -> Iterator[Advance]:
    """Show a progress bar with the remaining time on stderr, if it is a terminal; `unit` is a plural.

    Yields:
        A function that advances the bar by a number of items.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)
