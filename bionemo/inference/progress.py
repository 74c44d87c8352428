# SPDX-License-Identifier: Apache-2.0
"""How far a computation is, for those who look at it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]
"""Told of everything that is done."""


def silent(count: int) -> None:
    """Show nothing."""


@contextmanager
def progress(what: str, total: int, unit: str, shown: bool = True) -> Iterator[Advance]:
    """Show a bar with the time left on stderr, where that is a terminal.

    Args:
        what: a verb and its object.
        total: how many there are to do.
        unit: of what.
        shown: False where another process shows it.

    Yields:
        A function to be told how many more are done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
