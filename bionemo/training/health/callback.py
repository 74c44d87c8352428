# SPDX-License-Identifier: Apache-2.0
"""Several ranks end as one: each knows what it is doing, and leaves when another one is gone or stuck.

The main thread only notes the phase that it is in: a step costs nothing, and no device is asked. A thread beside it
tells rank 0, and ends the process when the main thread cannot, as it waits for a rank that will not come.
"""

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from subprocess import Popen, TimeoutExpired
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import subprocess_script

from bionemo.common.redaction import redact_text
from bionemo.training.health.connection import Line
from bionemo.training.health.errors import lost_another, one_line
from bionemo.training.health.heartbeat_client import PATIENCE, Verdict
from bionemo.training.health.heartbeat_server import RollCall
from bionemo.training.health.phases import Phases
from bionemo.training.health.stacks import collectives, main_frame, megabytes, place

GRACE = 20.0  # seconds that a main thread has to leave by itself
log = logging.getLogger(__name__)


class Watch(Phases):
    """Notes what this rank is doing, and knows the verdict that ends it.

    Attributes:
        rank: this one.
        verdict: once there is one.
        error: the first that Lightning has seen; its clean-up may raise another one.
    """

    def __init__(self, limit: float) -> None:
        """Take `trainer.rank_timeout`, in seconds."""
        super().__init__()
        self._limit = limit
        self.rank, self._host = 0, socket.gethostname()
        self.verdict: Verdict | None = None
        self.error: BaseException | None = None
        self._failed: str | None = None
        self._left = False
        self._decided = threading.Event()
        self._line: Line | None = None
        self._roll: RollCall | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Start to watch; there need be no process group yet, nor any other rank."""
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        # Lightning's own observer kills all processes of the host, without a word and this one included
        subprocess_script._launch_process_observer = lambda child_processes: None
        self._trainer, self.rank = trainer, trainer.global_rank
        self._interval = min(self._limit / 10, max(1.0, trainer.world_size / 250))  # 250 words a second at rank 0
        if self.rank == 0:
            self._roll = RollCall(trainer.world_size, self._limit, self._interval, self._children)
            self._roll.start()
        self._line = Line(
            self._words, self._obey, (environment.main_address, environment.main_port), "bionemo/watch",
            self._roll.port if self._roll else 0, self._limit, self._interval,
        )  # fmt: skip
        self._line.start()

    def enter(self, phase: str) -> None:
        """Note a phase, and tell rank 0 at once."""
        super().enter(phase)
        self._speak()

    def end(self) -> None:
        """Watch no longer: this rank has done its part."""
        self._left = True
        self._speak()
        if self._roll is not None:
            self._roll.finish()
        if self._line is not None:
            self._line.end()
        faulthandler.cancel_dump_traceback_later()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Tell at once: what Lightning does before the error goes on may wait for other ranks."""
        self.error = self.error or exception
        if trainer.world_size > 1 and not lost_another(exception):
            self.fail(exception)

    def fail(self, error: BaseException) -> None:
        """Tell why this rank ends: the first error of any rank is the verdict."""
        if self._failed is None:
            self._failed = one_line(error, self.rank, str(self), self.doing)
            self._speak()

    def wait(self) -> Verdict | None:
        """Wait until there is a verdict; None when there is none for too long."""
        self._decided.wait(3 * PATIENCE + 2 * self._interval)
        if self.verdict is not None:
            self._let_others_leave()
        return self.verdict

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self._host}, process {os.getpid()})"

    def _speak(self) -> None:
        if self._line is not None:
            self._line.speak()

    def _words(self) -> dict[str, Any]:
        """What this rank says of itself every few seconds, in the thread of the line."""
        self._end_if_no_thread_runs()
        return {
            "rank": self.rank,
            "host": self._host,
            "process": os.getpid(),
            "begun": collectives(),
            "megabytes": megabytes(),
            "doing": self.doing,
            "place": place(),
            "failed": self._failed,
            "left": self._left,
        }

    def _end_if_no_thread_runs(self) -> None:
        """Have the process ended, and its stacks logged, if Python's lock is held too long for coming here again."""
        handlers = logging.getLogger("bionemo").handlers
        files: list[Any] = [handler.stream for handler in handlers if isinstance(handler, logging.FileHandler)]
        with suppress(ValueError):  # a file that was closed
            faulthandler.dump_traceback_later(self._limit + GRACE, exit=True, file=[*files, sys.stderr][0])

    def _obey(self, verdict: Verdict, own: bool) -> None:
        """Say why, once for all ranks, let the main thread leave if it can, and end the process if it cannot."""
        line = verdict.line + (f" (trainer.rank_timeout is {self._limit:.0f} s)" if verdict.kind == "stuck" else "")
        if own or self.rank == 0:
            print(redact_text(f"error: {line}"), file=sys.stderr, flush=True)
        stack = "".join(traceback.format_stack(main_frame()))
        _try(lambda: log.info("%s; the main thread was in\n%s", line, stack))
        self.verdict = verdict
        self._decided.set()
        time.sleep(0 if verdict.kind == "stuck" else GRACE)
        self._let_others_leave()
        for logger in self._trainer.loggers:
            _try(partial(logger.finalize, "failed"))
        os._exit(1)

    def _let_others_leave(self) -> None:
        """On rank 0, see that all have heard the verdict, and that no process started here stays."""
        if self._roll is None:
            return
        self._roll.join(GRACE / 2)
        until = time.monotonic() + GRACE / 2
        for child in self._children():
            try:
                child.wait(max(until - time.monotonic(), 0))
            except TimeoutExpired:
                child.kill()

    def _children(self) -> list[Popen[Any]]:
        return getattr(self._trainer.strategy.launcher, "procs", [])


def _try(task: Callable[[], Any]) -> None:
    """Do something that may wait for a lock of the main thread's, but not for long."""
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(PATIENCE)
