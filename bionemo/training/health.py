# SPDX-License-Identifier: Apache-2.0
"""All ranks of a run end with one error message if one of them fails, dies or hangs.

The main thread only records its phase, at no cost and without synchronizing with the device. A thread writes the
status of its rank to torch's TCPStore, which rank 0 hosts. Rank 0 reads them all, decides why the run has to end, and
writes this verdict to its own status, which the other ranks read.
"""

import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from bionemo.common.errors import UserError, describe, signal_name
from bionemo.common.launcher_environment import launched_process
from bionemo.common.redaction import redact_text
from bionemo.training.patches import disable_process_observer

EXIT_SECONDS = 10.0  # time that the main thread has to exit before the process is ended
_WINDOW = 0.5  # seconds in which several ranks may report the same failure; the lowest rank is named
_MAX_LISTED = 3  # ranks named in a message
_runs = itertools.count()  # runs of this process
log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Why the run ends: the lowest rank that caused it, and the error message, one line."""

    rank: int
    message: str


@dataclass
class RankStatus:
    """What a rank writes to the store."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    beat: int = 0  # number of times that the status was written
    phase: str = "before the start"  # phase of the run, such as "in step 17"
    collectives: dict[str, int] = field(default_factory=dict)  # collectives started, by process group
    io_megabytes: int = 0  # data read and written so far; a long save is progress
    error: str = ""  # message of the error that ended the rank
    disconnected: bool = False  # the error only says that another rank has ended
    finished: bool = False  # the rank needs the store no more
    verdict: Sequence[Any] = ()  # on rank 0: the fields of the verdict

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (host {self.host}, process {self.process})" if self.beat else "")


@dataclass
class ObservedRank(RankStatus):
    """The status of a rank as read from the store. Times are seconds of the observer's clock."""

    last_heartbeat: float = 0.0  # time at which a new status was read
    last_progress: float = 0.0  # time at which the status contained something new
    failed: float = 0.0  # time at which the error was read
    exit_code: int | None = None  # of a process started by rank 0, negative for a signal

    def update(self, status: dict[str, Any], now: float) -> None:
        """Apply a status, whose keys are names of attributes."""
        new = [key for key, value in status.items() if getattr(self, key) != value]
        self.last_heartbeat = now if new else self.last_heartbeat
        self.last_progress = now if new not in ([], ["beat"]) else self.last_progress
        self.failed = now if "error" in new and not self.error else self.failed
        vars(self).update(status)

    def describe_end(self, now: float, has_died: bool) -> str:
        """Describe a rank that writes no status any more."""
        silence = f"for {now - self.last_heartbeat:.0f} s (trainer.rank_timeout)"
        how = f"has not answered {silence}, because its process or host was stopped"
        if self.exit_code:
            killed = self.exit_code < 0
            how = f"was killed by {signal_name(-self.exit_code)}" if killed else f"exited with {self.exit_code}"
        elif has_died:
            how = "ended without an error message"
        elif not self.beat:
            return f"{self} has not connected {silence}"
        return f"{self} {how}, last seen {self.phase}"


def diagnose(ranks: Sequence[ObservedRank], now: float, timeout: float, interval: float) -> Verdict | None:
    """Determine which rank failed, died or hung; None while all is well or undecided.

    Args:
        ranks: all ranks, in order.
        now: time of the observer's clock.
        timeout: seconds within which some rank must make progress.
        interval: seconds between two status messages of a rank.
    """
    failed = [each for each in ranks if each.error]
    since = now - min((each.failed for each in failed), default=now)
    causes = [each for each in failed if not each.disconnected]
    if causes and since >= _WINDOW:
        return Verdict(causes[0].rank, causes[0].error)
    idle = now - max(each.last_progress for each in ranks)
    silence = 3 * interval if failed else timeout if idle > timeout else now
    running = [each for each in ranks if not each.error and not each.finished]
    if silent := [each for each in running if each.exit_code is not None or now - each.last_heartbeat > silence]:
        return Verdict(silent[0].rank, _join([each.describe_end(now, bool(failed)) for each in silent]))
    if failed and since > 5 * interval:
        return Verdict(failed[0].rank, failed[0].error)
    if idle <= timeout or not running:
        return None
    behind = _find_ranks_behind(ranks)
    waited = "others have waited" if behind else "all ranks have waited for each other"
    named = behind or running
    lines = _join([f"{each} is {each.phase}" for each in named])
    return Verdict(named[0].rank, f"{lines}: {waited} for {idle:.0f} s (trainer.rank_timeout)")


def _join(lines: Sequence[str]) -> str:
    more = [f"{len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "; ".join([*lines[:_MAX_LISTED], *more])


def _find_ranks_behind(ranks: Sequence[ObservedRank]) -> list[ObservedRank]:
    """Return the ranks that others wait for and that wait for no other rank.

    They have started fewer collectives than others in some process group, and more than others in none.
    """
    counts: dict[str, list[int]] = {}
    for each in ranks:
        for group, count in each.collectives.items():
            counts.setdefault(group, []).append(count)
    return [
        each
        for each in ranks
        if any(count < max(counts[group]) for group, count in each.collectives.items())
        and all(count == min(counts[group]) for group, count in each.collectives.items())
    ]


def _count_collectives() -> dict[str, int]:
    """Return the number of collectives that this rank has started, by process group.

    Pipeline groups are left out: a middle stage sends and receives more than the others.
    """
    groups: list[Any] = [group for group in list(_world.pg_map) if "PIPELINE" not in group.group_desc]
    with suppress(RuntimeError):  # a backend that does not count
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}
    return {}


def _count_io_megabytes() -> int:
    """Return the amount of data that this process has read and written."""
    with suppress(OSError):
        return sum(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()) >> 20
    return 0


def _set_phase(phase: str) -> Any:
    """Return a callback hook that records a phase."""

    def hook(self: "HealthMonitor", trainer: pl.Trainer, *arguments: Any, **_: Any) -> None:
        batch = arguments[2] + 1 if "{batch}" in phase else 0
        self.status.phase = phase.format(step=trainer.global_step, next=trainer.global_step + 1, batch=batch)

    return hook


class HealthMonitor(pl.Callback):
    """Tracks the phase of this rank and ends the process when there is a verdict.

    Args:
        timeout: `trainer.rank_timeout` in seconds.

    Attributes:
        status: status of this rank.
        ranks: what this rank has read: on rank 0 the status of all ranks, on others that of rank 0.
        verdict: why the run ends, once it is known.
        error: first exception that Lightning reported; its clean-up may raise another one.
    """

    setup = _set_phase("building the model")
    on_fit_start = _set_phase("preparing the first step")
    on_train_batch_start = _set_phase("in step {next}")
    on_train_batch_end = _set_phase("after step {step}")
    on_validation_start = _set_phase("in validation after step {step}")
    on_validation_batch_start = _set_phase("in validation after step {step}, batch {batch}")
    on_validation_end = _set_phase("after validation at step {step}")
    on_test_batch_start = _set_phase("in the test, batch {batch}")
    on_save_checkpoint = _set_phase("saving step {step}")
    on_train_end = _set_phase("after the last step")

    def __init__(self, timeout: float) -> None:
        self._timeout, self.status = timeout, RankStatus(0)
        self.ranks: dict[int, ObservedRank] = {}
        self.verdict: Verdict | None = None
        self.error: BaseException | None = None

    def start(self, trainer: pl.Trainer) -> None:
        """Start the thread; process groups and other ranks need not exist yet."""
        strategy: Any = trainer.strategy
        self._trainer, self._launcher, self.status.rank = trainer, strategy.launcher, trainer.global_rank
        self._address = strategy.cluster_environment.main_address, strategy.cluster_environment.main_port
        # The store of a launcher outlives a run of a sweep, in all of which its processes take part, and torchrun's
        # outlives its processes.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"bionemo/{attempt}/{next(_runs) if launched_process() else 0}/"
        self._interval = min(self._timeout / 10, max(1.0, trainer.world_size / 250))  # at most 250 per second in total
        self.ranks = {rank: ObservedRank(rank) for rank in range(1 if self.status.rank else trainer.world_size)}
        self._store: dist.TCPStore | None = None
        self._exchanging: threading.Thread | None = None
        self._refused, self._clock = False, 0.0
        self._due, self._decided, self._left = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="health monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End monitoring after a completed run."""
        self.status.finished = True
        self._due.set()
        self._thread.join(5 * self._interval)
        self._left.set()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Report an error immediately, because Lightning's clean-up may wait for other ranks."""
        self.error = self.error or exception
        if trainer.world_size > 1 and not is_connection_error(exception):
            self.report(exception)

    def report(self, error: BaseException) -> None:
        """Report why this rank ends."""
        if not self.status.error or self.status.disconnected:
            self.status.disconnected = is_connection_error(error)
            self.status.error = self.describe(error)
            self._due.set()

    def describe(self, error: BaseException) -> str:
        """Return the message of an error in one line, with rank, host, process and phase where they help."""
        if isinstance(error, UserError):
            what = f"rank {self.status.rank}: {error}" if self.status.rank else str(error)
            return " ".join(what.split())
        if is_connection_error(error):
            what, why = "lost the connection to another rank", f": {str(error).splitlines()[0]}"
        elif isinstance(error, Exception):
            what, why = "failed", f": {describe(error) or f'{type(error).__name__}: {error}'}"
        else:
            what, why = "was interrupted", ""
        return " ".join(f"{self.status} {what} {self.status.phase}{why}".split())

    def select_exception(self, error: BaseException) -> BaseException:
        """Return the exception to raise on this rank: the error itself if its traceback is needed, else SystemExit."""
        self.report(error)
        self._decided.wait(3 + 10 * self._interval)
        self._left.set()
        if not isinstance(error, Exception):
            return error
        log.info("exiting: %s", self.describe(error))
        is_expected = describe(error) is not None or is_connection_error(error)
        if self.verdict is None and is_expected:  # rank 0 does not answer
            print(redact_text(f"error: {self.describe(error)}"), file=sys.stderr, flush=True)
        is_cause = self.verdict is None or self.verdict.rank == self.status.rank
        show_traceback = not is_expected or os.environ.get("HYDRA_FULL_ERROR") == "1"
        return error if is_cause and show_traceback else SystemExit(1)

    def _run(self) -> None:
        previous = time.monotonic()
        while self.verdict is None and not self.status.finished:
            has_error = self.status.error or any(each.error for each in self.ranks.values())
            self._due.wait(min(self._interval, _WINDOW / 2) if has_error else self._interval)
            self._due.clear()
            elapsed, previous = time.monotonic() - previous, time.monotonic()
            self._clock += min(elapsed, 2 * self._interval)  # not the time during which this process was stopped
            self._exchange()
            self.verdict = self._decide()
        if self.verdict is not None and not self.ranks[0].verdict:  # this rank has decided
            print(redact_text(f"error: {self.verdict.message}"), file=sys.stderr, flush=True)
            self.status.verdict = self.verdict
        self.status.finished = True
        self._exchange()
        until = time.monotonic() + 3 * self._interval
        while self.status.rank == 0 and not all(each.finished for each in self.ranks.values()):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
            self._exchange()
        self._decided.set()
        if self.verdict is not None and not self._left.wait(EXIT_SECONDS):
            self._end_process()

    def _decide(self) -> Verdict | None:
        rank_0, timeout, interval = self.ranks[0], self._timeout, self._interval
        if self.status.rank == 0:
            return diagnose([*self.ranks.values()], self._clock, timeout, interval)
        if rank_0.verdict:
            return Verdict(*rank_0.verdict)
        has_died = rank_0.beat > 0 and (self._refused or self.status.disconnected)
        if self._clock - rank_0.last_heartbeat <= (3 * interval if has_died else timeout):
            return None
        return Verdict(0, rank_0.describe_end(self._clock, has_died))

    def _exchange(self) -> None:
        """Exchange statuses through the store, in a thread because an operation waits if rank 0 is stopped."""
        if self._exchanging is None or not self._exchanging.is_alive():
            self._exchanging = threading.Thread(target=self._write_and_read, name="health exchange", daemon=True)
            self._exchanging.start()
        self._exchanging.join(self._interval)

    def _write_and_read(self) -> None:
        for rank, process in enumerate(getattr(self._launcher, "procs", []) if self.status.rank == 0 else [], 1):
            self.ranks[rank].exit_code = process.poll()
        self.status.beat += 1
        self.status.collectives, self.status.io_megabytes = _count_collectives(), _count_io_megabytes()
        self._refused = False
        try:
            store = self._open_store()
            store.set(f"{self._key}{self.status.rank}", json.dumps(asdict(self.status)))
            for rank, each in self.ranks.items():
                if store.check([f"{self._key}{rank}"]):
                    each.update(json.loads(store.get(f"{self._key}{rank}")), self._clock)
        except (OSError, RuntimeError) as error:  # RuntimeError: of torch's store
            self._store, self._refused = None, isinstance(error, ConnectionRefusedError)

    def _open_store(self) -> dist.TCPStore:
        is_host = self.status.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_host:  # torch's store would write a long message to the console if nobody listens
            socket.create_connection(self._address, self._interval).close()
        if self._store is None:  # on the port that torch's process groups will use
            timeout = timedelta(seconds=max(self._interval, 1.0))
            self._store = dist.TCPStore(
                *self._address, is_master=is_host, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        return self._store

    def _end_process(self) -> None:
        logs = threading.Thread(target=self._close_logs, daemon=True)  # it may wait for a lock of the main thread
        logs.start()
        logs.join(1.0)
        if self._launcher is not None:
            self._launcher.kill(signal.SIGKILL)
        os._exit(1)

    def _close_logs(self) -> None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        log.info("%s; the main thread was in\n%s", self.verdict, "".join(traceback.format_stack(frame)))
        for logger in self._trainer.loggers:
            logger.finalize("failed")


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
            cause = _find_cause(error, monitor.error)
            selected = monitor.select_exception(cause) if trainer.world_size > 1 else cause
            if selected is error:
                raise
            raise selected from error
        if trainer.world_size > 1:
            monitor.stop()
        if monitor.verdict is not None:
            sys.exit(1)


def _find_cause(error: BaseException, first: BaseException | None) -> BaseException:
    """Return the error that ended the run; Lightning's clean-up may have raised an unexpected one after it."""
    is_bug = isinstance(error, Exception) and describe(error) is None
    return first if is_bug and first is not None and describe(first) is not None else error
