# SPDX-License-Identifier: Apache-2.0
"""Training throughput, without padding tokens and without the time for validation and checkpoints."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Measures time, steps and tokens between two readings."""

    def __init__(self) -> None:
        self._pause_depth = 0  # pauses are nested if a validation saves a checkpoint
        self.start(None)

    def start(self, consumed_tokens: int | None) -> None:
        """Start the first interval."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, consumed_tokens

    def count_step(self) -> None:
        """Count a step."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a `with` block."""
        start = time.perf_counter()
        self._pause_depth += 1
        yield
        self._pause_depth -= 1
        if self._pause_depth == 0:
            self._since += time.perf_counter() - start

    def read(self, consumed_tokens: int) -> tuple[float, float]:
        """Return tokens per second and seconds per step since the last reading, and start the next interval."""
        elapsed, steps = max(time.perf_counter() - self._since, 1e-9), max(self._steps, 1)
        tokens = consumed_tokens - (self._tokens if self._tokens is not None else consumed_tokens)
        self.start(consumed_tokens)
        return tokens / elapsed, elapsed / steps
