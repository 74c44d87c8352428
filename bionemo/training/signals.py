# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a run to save and end, and Ctrl-C, which ends it at once where there is nothing to save."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from bionemo.common.launcher_environment import speaks_for_all

_SAME_KEY_PRESS = 0.5  # seconds in which SIGINT comes again from a launcher that forwards the terminal's


class Signals:
    """Listens while it is entered; the handlers from before are then restored. Ignored signals stay ignored.

    SIGTERM, SIGUSR1 and SIGHUP are noted. SIGINT is noted while there are steps to save; a second one, and any other,
    ends the process at once: a checkpoint has its name only when it is complete. A thread does that, so that it also
    works while the main thread waits for another rank or a device.

    Attributes:
        number: of the signal that was noted; 0: none.
        saving: whether there are steps that would be saved.
        send: sends a signal to the processes that this one has started.
    """

    def __init__(self) -> None:
        self.number, self.saving = 0, False
        self.send: Callable[[Any], object] = lambda number: None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._wakeup: tuple[int, int] | None = None  # file descriptor of ours, and the one from before
        self._interrupted_at: float | None = None

    def __enter__(self) -> "Signals":
        if self.listen(signal.SIGINT):
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._wakeup = writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakeup is not None:
            writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(writer)  # which ends the thread
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def listen(self, *numbers: int) -> bool:
        """Note these signals from now on, unless they are ignored, as after nohup and in background jobs of scripts.

        Returns:
            Whether one is listened to; only the main thread of a process can.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        for number in heard:
            before = signal.signal(number, self._notice)
            if number != signal.SIGTERM:  # Lightning's at this time, which it takes back by itself
                self._previous.setdefault(number, before)
        return bool(heard)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Note that the run has to end between two steps: a save in the middle of one would be inconsistent."""
        if number == signal.SIGINT or os.getpid() != self._process:  # the thread handles it; a fork leaves it to us
            return
        self._note(number)
        if number != signal.SIGHUP:  # a terminal sends it to all processes
            self.send(number)

    def _note(self, number: int) -> None:
        self.number = self.number or number
        _survive_lost_console(number)

    def _watch(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as arrived:
            while byte := arrived.read(1):
                if byte[0] == signal.SIGINT:
                    self._interrupted()

    def _interrupted(self) -> None:
        """Note the first Ctrl-C where there is something to save, else end now."""
        now = time.monotonic()
        if self.saving and (self._interrupted_at is None or now - self._interrupted_at < _SAME_KEY_PRESS):
            self._interrupted_at = self._interrupted_at or now
            self._note(signal.SIGINT)
            return
        if speaks_for_all():
            shown = b"\x1b[?25h" if os.isatty(2) else b""  # the cursor, which a progress bar hides
            with suppress(OSError):
                os.write(2, shown + b"\ninterrupted\n")
        self.send(signal.SIGKILL)
        os._exit(128 + signal.SIGINT)


class _Tolerant:
    """A stream whose reader may have gone: writing to it raises no error."""

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


def _survive_lost_console(number: int) -> None:
    """See that the save does not fail because a closed terminal, or a `| tee` that got the signal too, is gone."""
    if number == signal.SIGHUP:
        for descriptor in (1, 2):
            with suppress(OSError):
                if os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Tolerant):
            setattr(sys, name, _Tolerant(stream))


def _forget_wakeup() -> None:
    """Have signals of a forked process not wake its parent's thread."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)
