# SPDX-License-Identifier: Apache-2.0
"""Useful tokens per second: filler and the time spent on validation and checkpoints do not count."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Time and tokens between two readings."""

    def __init__(self) -> None:
        self._depth = 0  # a checkpoint is saved inside a validation: that time is left out once
        self._tokens: int | None = None
        self._steps = 0
        self._since = time.perf_counter()

    def step(self) -> None:
        """Count a step."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        start = time.perf_counter()
        self._depth += 1
        yield
        self._depth -= 1
        if self._depth == 0:
            self._since += time.perf_counter() - start

    def read(self, consumed_tokens: int) -> tuple[float, float]:
        """Tokens a second and seconds a step since the last reading; starts the next interval."""
        now = time.perf_counter()
        elapsed, steps = max(now - self._since, 1e-9), max(self._steps, 1)
        tokens = consumed_tokens - (self._tokens if self._tokens is not None else consumed_tokens)
        self._since, self._steps, self._tokens = now, 0, consumed_tokens
        return tokens / elapsed, elapsed / steps

    def start(self, consumed_tokens: int) -> None:
        """Begin the first interval."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, consumed_tokens
