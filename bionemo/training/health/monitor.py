# SPDX-License-Identifier: Apache-2.0
"""Health monitor: ends all ranks with a single error message if one of them fails, dies or hangs.

The main thread only records its current phase, at no cost and without synchronizing with the device. A thread sends
heartbeats to rank 0. It ends the process if the main thread cannot because it waits for another rank.
"""

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from subprocess import Popen, TimeoutExpired
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from bionemo.common.errors import UserError, describe
from bionemo.common.redaction import redact_text
from bionemo.training.health import rank_status
from bionemo.training.health.heartbeat_client import HeartbeatClient
from bionemo.training.health.heartbeat_server import HeartbeatServer
from bionemo.training.health.rank_status import RECONNECT_SECONDS, Diagnosis
from bionemo.training.patches import disable_process_observer

EXIT_SECONDS = 20.0  # time that the main thread has to exit before the process is ended
log = logging.getLogger(__name__)


def _set_phase(phase: str, send: bool = True) -> Any:
    """Return a callback hook that records a phase; with `send` it also sends a heartbeat."""

    def hook(self: "HealthMonitor", trainer: pl.Trainer, *arguments: Any, **_: Any) -> None:
        batch = arguments[2] + 1 if "{batch}" in phase else 0
        self.phase = phase.format(step=trainer.global_step, next=trainer.global_step + 1, batch=batch)
        if send:
            self.send()

    return hook


class HealthMonitor(pl.Callback):
    """Tracks the phase of this rank and ends the process when there is a diagnosis.

    Args:
        timeout: `trainer.rank_timeout` in seconds.

    Attributes:
        phase: what the main thread is doing.
        rank: rank of this process.
        diagnosis: why the run ends, once it is known.
        error: first exception that Lightning reported; its clean-up may raise another one.
    """

    setup = _set_phase("building the model")
    on_fit_start = _set_phase("preparing the first step")
    on_train_batch_start = _set_phase("in step {next}", send=False)
    on_train_batch_end = _set_phase("after step {step}", send=False)
    on_validation_start = _set_phase("in validation after step {step}")
    on_validation_batch_start = _set_phase("in validation after step {step}, batch {batch}", send=False)
    on_validation_end = _set_phase("after validation at step {step}")
    on_test_batch_start = _set_phase("in the test, batch {batch}", send=False)
    on_save_checkpoint = _set_phase("saving step {step}")
    on_train_end = _set_phase("after the last step")

    def __init__(self, timeout: float) -> None:
        self.phase = "before the start"
        self.rank, self._host, self._timeout = 0, socket.gethostname(), timeout
        self.diagnosis: Diagnosis | None = None
        self.error: BaseException | None = None
        self._error_message: str | None = None
        self._finished = False
        self._diagnosed = threading.Event()
        self._client: HeartbeatClient | None = None
        self._server: HeartbeatServer | None = None

    def start(self, trainer: pl.Trainer) -> None:
        """Start the threads; process groups and other ranks need not exist yet."""
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        self._trainer, self.rank = trainer, trainer.global_rank
        # at most 250 heartbeats per second in total
        self._interval = min(self._timeout / 10, max(1.0, trainer.world_size / 250))
        if self.rank == 0:
            self._server = HeartbeatServer(trainer.world_size, self._timeout, self._interval, self._child_processes)
            self._server.start()
        self._client = HeartbeatClient(
            self._get_status, self._end_process, (environment.main_address, environment.main_port),
            self._server.port if self._server else None, self._timeout, self._interval,
        )  # fmt: skip
        self._client.start()

    def stop(self) -> None:
        """End monitoring after a completed run."""
        self._finished = True
        self.send()
        if self._server is not None:
            self._server.finish()
        if self._client is not None:
            self._client.stop()
        faulthandler.cancel_dump_traceback_later()

    def send(self) -> None:
        """Send a heartbeat immediately."""
        if self._client is not None:
            self._client.send()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Report an error immediately, because Lightning's clean-up may wait for other ranks."""
        self.error = self.error or exception
        if trainer.world_size > 1 and not is_connection_error(exception):
            self.report(exception)

    def report(self, error: BaseException) -> None:
        """Report why this rank ends; the first error of all ranks becomes the diagnosis."""
        if self._error_message is None:
            self._error_message = self.describe(error)
            self.send()

    def describe(self, error: BaseException) -> str:
        """Return the message of an error in one line, with rank, host, process and phase where they help."""
        name = f"rank {self.rank} (host {self._host}, process {os.getpid()})"
        if isinstance(error, UserError):
            message = f"rank {self.rank}: {error}" if self.rank else str(error)
        elif is_connection_error(error):
            message = f"{name} lost the connection to another rank {self.phase}: {str(error).splitlines()[0]}"
        elif isinstance(error, Exception):
            message = f"{name} failed {self.phase}: {describe(error) or f'{type(error).__name__}: {error}'}"
        else:
            message = f"{name} was interrupted {self.phase}"
        return " ".join(message.split())

    def wait(self) -> Diagnosis | None:
        """Wait for the diagnosis, at most a few seconds."""
        self._diagnosed.wait(3 * RECONNECT_SECONDS + 2 * self._interval)
        if self.diagnosis is not None:
            self._wait_for_other_ranks()
        return self.diagnosis

    def _get_status(self) -> dict[str, Any]:
        """Return the next heartbeat; called by the heartbeat client."""
        if not self._finished:
            self._schedule_exit()
        return {
            "rank": self.rank,
            "host": self._host,
            "pid": os.getpid(),
            "collectives": rank_status.count_collectives(),
            "io_megabytes": rank_status.count_io_megabytes(),
            "phase": self.phase,
            "location": rank_status.main_thread_location(),
            "error": self._error_message,
            "finished": self._finished,
        }

    def _schedule_exit(self) -> None:
        """Write stacks to the log if the GIL is held so long that this method is not called again.

        The process does not exit: it may only have been suspended, by Slurm or with a laptop.
        """
        handlers = logging.getLogger("bionemo").handlers
        files: list[Any] = [handler.stream for handler in handlers if isinstance(handler, logging.FileHandler)]
        with suppress(ValueError):  # the file is closed
            faulthandler.dump_traceback_later(self._timeout + EXIT_SECONDS, file=[*files, sys.stderr][0])

    def _end_process(self, diagnosis: Diagnosis, print_message: bool) -> None:
        """Print the message once for all ranks, let the main thread end if it can, then end the process."""
        hung = diagnosis.kind == "hung"
        message = diagnosis.message + (f" (trainer.rank_timeout is {self._timeout:.0f} s)" if hung else "")
        if print_message or self.rank == 0:
            print(redact_text(f"error: {message}"), file=sys.stderr, flush=True)
        stack = "".join(traceback.format_stack(rank_status.main_thread_frame()))
        _run_with_timeout(lambda: log.info("%s; the main thread was in\n%s", message, stack))
        self.diagnosis = diagnosis
        self._diagnosed.set()
        time.sleep(0 if hung else EXIT_SECONDS)
        self._wait_for_other_ranks()
        for logger in self._trainer.loggers:
            _run_with_timeout(partial(logger.finalize, "failed"))
        if hung and print_message and self._client is not None:  # this rank says that rank 0 does not answer
            time.sleep(RECONNECT_SECONDS + 2 * self._interval)  # until the other ranks have found the same
            self._client.kill_unresponsive_rank_0()
        os._exit(1)

    def _wait_for_other_ranks(self) -> None:
        """On rank 0, wait until all ranks have the diagnosis, and kill processes started here that do not end."""
        if self._server is None:
            return
        self._server.join(EXIT_SECONDS / 2)
        deadline = time.monotonic() + EXIT_SECONDS / 2
        for process in self._child_processes():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except TimeoutExpired:
                process.kill()

    def _child_processes(self) -> list[Popen[Any]]:
        return getattr(self._trainer.strategy.launcher, "procs", [])


def is_connection_error(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@contextmanager
def report_first_error(monitor: HealthMonitor, trainer: pl.Trainer) -> Iterator[None]:
    """Monitor all ranks; print the first error of any rank once, and no errors that follow from it.

    Rank 0 prints the message. An unexpected error (a bug) is also raised on its own rank, with a traceback.
    """
    monitor.error = None
    with disable_process_observer():
        if trainer.world_size > 1:
            monitor.start(trainer)
        try:
            yield
        except BaseException as error:
            cause = _find_cause(error, monitor)
            selected = _select_exception(cause, monitor) if trainer.world_size > 1 else cause
            if selected is error:
                raise
            raise selected from error
        if monitor.diagnosis is not None:
            sys.exit(1)
        monitor.stop()


def _find_cause(error: BaseException, monitor: HealthMonitor) -> BaseException:
    """Return the error that ended the run; Lightning's clean-up may have raised an unexpected one after it."""
    first = monitor.error
    if first is None or not isinstance(error, Exception) or describe(error) is not None:
        return error
    return first if describe(first) is not None else error


def _select_exception(error: BaseException, monitor: HealthMonitor) -> BaseException:
    """Return the exception to raise on this rank: the error itself if its traceback is needed, else SystemExit."""
    diagnosis = monitor.wait() if is_connection_error(error) else None
    if diagnosis is None:
        monitor.report(error)
        diagnosis = monitor.wait()
    if not isinstance(error, Exception):
        return error
    message = monitor.describe(error)
    log.info("exiting: %s", message)
    is_expected = describe(error) is not None or is_connection_error(error)
    if diagnosis is None and is_expected:  # rank 0 does not answer
        print(redact_text(f"error: {message}"), file=sys.stderr, flush=True)
    is_cause = diagnosis is None or (diagnosis.kind, diagnosis.rank) == ("failed", monitor.rank)
    show_traceback = not is_expected or os.environ.get("HYDRA_FULL_ERROR") == "1"
    return error if is_cause and show_traceback else SystemExit(1)


def _run_with_timeout(task: Callable[[], Any]) -> None:
    """Run a task that may wait for a lock of the main thread, but not for long."""
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(RECONNECT_SECONDS)
