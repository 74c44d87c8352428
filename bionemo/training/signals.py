# SPDX-License-Identifier: Apache-2.0
"""Handling of signals that ask a run to save and exit, and of Ctrl-C."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

from bionemo.common.launcher_environment import is_global_rank_zero

_SAME_KEY_PRESS = 0.5  # seconds within which a launcher may forward the SIGINT that the terminal has sent


class Signals:
    """Context manager that records signals and restores the previous handlers. Ignored signals stay ignored.

    Signals are recorded while there are steps to save. At any other time, and at a second SIGINT, they end the process
    at once, which is safe because a checkpoint gets its name when it is complete. A thread ends the process, so that
    this also works while the main thread waits for another rank or a device.

    Attributes:
        received: number of the first recorded signal; 0: none.
        has_steps_to_save: whether there are steps to save.
        phase: what a signal interrupts if there are none, for the message.
        send_to_children: sends a signal to the processes that this one has started.
    """

    def __init__(self) -> None:
        self.received, self.has_steps_to_save = 0, False
        self.phase = "before the first step: nothing is saved"
        self.send_to_children: Callable[[Any], object] = lambda number: None
        self._previous_handlers: dict[int, Any] = {}
        self._pid = os.getpid()
        self._wakeup_fds: tuple[int, int] | None = None  # ours and the previous one
        self._interrupted_at: float | None = None
        self._ending = threading.RLock()

    def __enter__(self) -> "Signals":
        self.listen(signal.SIGTERM, signal.SIGUSR1)
        if self.listen(signal.SIGINT):
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._wakeup_fds = writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._read_signals, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakeup_fds is not None:
            writer, previous = self._wakeup_fds
            signal.set_wakeup_fd(previous)
            os.close(writer)  # ends the thread
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) == self._handle:  # ignored now: see `ignore_sigterm_after_training`
                signal.signal(number, handler)
        self._previous_handlers = {}

    def listen(self, *numbers: int) -> bool:
        """Install handlers, except for ignored signals (after nohup, or in background jobs of scripts).

        Returns:
            Whether a handler was installed; this is possible in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        handled = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        for number in handled:
            self._previous_handlers.setdefault(number, signal.signal(number, self._handle))
        return bool(handled)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; the run ends between two steps, because the state within a step is inconsistent."""
        if number == signal.SIGINT or os.getpid() != self._pid:  # the thread handles SIGINT; not in forked processes
            return
        if not self.has_steps_to_save:
            self._end_process(number)
        self._record(number)
        if number != signal.SIGHUP:  # the terminal sends it to all processes
            self.send_to_children(number)

    def _record(self, number: int) -> None:
        self.received = self.received or number
        _tolerate_lost_console(number)

    def _read_signals(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while byte := signals.read(1):
                if byte[0] == signal.SIGINT:
                    self._interrupt()
                elif byte[0] in self._previous_handlers and not self.has_steps_to_save:
                    self._end_process(byte[0])

    def _interrupt(self) -> None:
        """Record the first Ctrl-C if there are steps to save, else end the process."""
        now = time.monotonic()
        if self.has_steps_to_save and (self._interrupted_at is None or now - self._interrupted_at < _SAME_KEY_PRESS):
            self._interrupted_at = self._interrupted_at or now
            self._record(signal.SIGINT)
            return
        self._end_process(signal.SIGINT)

    def _end_process(self, number: int) -> NoReturn:
        with self._ending:  # not released: the main thread and the other thread may both be here
            if is_global_rank_zero():
                show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
                is_second = number == signal.SIGINT and self.has_steps_to_save
                phase = "again: the steps since the last checkpoint are not saved" if is_second else self.phase
                with suppress(OSError):
                    os.write(2, f"{show_cursor}\nreceived {signal.Signals(number).name} {phase}\n".encode())
            self.send_to_children(signal.SIGKILL)
            os._exit(128 + number)


class _TolerantStream:
    """Stream that ignores write errors, for example when the reading process has exited."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _tolerate_lost_console(number: int) -> None:
    """Ignore console write errors, so that the save succeeds after the terminal or `| tee` has been closed."""
    if number == signal.SIGHUP:
        for descriptor in (1, 2):
            with suppress(OSError):
                if os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _TolerantStream):
            setattr(sys, name, _TolerantStream(stream))


def _reset_wakeup_fd() -> None:
    """Do not wake the parent's thread by signals of a forked process."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)
