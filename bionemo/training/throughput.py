# SPDX-License-Identifier: Apache-2.0
"""Training throughput, without padding and without the time for validation and checkpoints."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Reading(NamedTuple):
    """Speed since the reading before."""

    tokens_per_second: float  # of all ranks
    seconds_per_step: float
    flops_per_second: float  # of this model replica


class Throughput:
    """Measures time, steps, tokens and FLOPs between two readings."""

    def __init__(self) -> None:
        self._pause_depth = 0  # pauses are nested if a validation saves a checkpoint
        self.start(None)

    def start(self, consumed_tokens: int | None) -> None:
        """Start the first interval."""
        self._since, self._steps, self._flops, self._tokens = time.perf_counter(), 0, 0.0, consumed_tokens

    def count_step(self, flops: float) -> None:
        """Count a step, and its FLOPs on this model replica."""
        self._steps += 1
        self._flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a `with` block."""
        start = time.perf_counter()
        self._pause_depth += 1
        yield
        self._pause_depth -= 1
        if self._pause_depth == 0:
            self._since += time.perf_counter() - start

    def read(self, consumed_tokens: int) -> Reading:
        """Return the speed since the last reading, and start the next interval."""
        elapsed, steps = max(time.perf_counter() - self._since, 1e-9), max(self._steps, 1)
        tokens = consumed_tokens - (self._tokens if self._tokens is not None else consumed_tokens)
        reading = Reading(tokens / elapsed, elapsed / steps, self._flops / elapsed)
        self.start(consumed_tokens)
        return reading
