# SPDX-License-Identifier: Apache-2.0
"""Notes and one-line errors on the console, printed once per run."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from bionemo.common.errors import HostError, RankError, describe
from bionemo.common.launcher_environment import (
    ERROR_DESCRIPTOR,
    check_environment,
    is_global_rank_zero,
    is_local_rank_zero,
)
from bionemo.common.limits import raise_open_files
from bionemo.common.redaction import redact_text, register_secrets, split_arguments

BUG_MESSAGE = "this is a bug in bionemo: please report it in the issue tracker, with the traceback above"


def notify(*notes: str) -> None:
    """Print notes for the user on stderr, on rank 0."""
    for note in notes:
        if is_global_rank_zero():
            print(redact_text(f"note: {note}"), file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[list[int]]:
    """Convert errors caused by the user, a file or the machine to one line on stderr and exit status 1.

    Ctrl-C exits with status 130. Any other exception is a bug in bionemo: its traceback is printed, followed by a
    line that asks the user to report it. Secrets are redacted in both. The block receives a list that is empty until
    SIGINT arrives.
    """
    register_secrets(split_arguments(sys.argv[1:]))
    interrupted = _note_interrupts()
    try:
        check_environment()
        raise_open_files()
        _check_directories()
        yield interrupted
    except Exception as error:
        if interrupted:  # a library raised another exception while it handled KeyboardInterrupt
            _end_interrupted()
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            sys.excepthook = lambda *raised: _print_traceback(raised[1])
            raise
        if isinstance(error, BrokenPipeError) and error.filename is None:  # the reader of the output has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at exit without another error
            sys.exit(128 + signal.SIGPIPE)
        report_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        _end_interrupted()


def report_error(error: Exception) -> None:
    """Print an error as `one_line_errors` describes."""
    line = describe(error)
    if line is None:
        _print_traceback(error)
    if (descriptor := os.environ.get(ERROR_DESCRIPTOR)) is not None:
        os.write(int(descriptor), redact_text(line or BUG_MESSAGE).encode(errors="backslashreplace"))
    elif line is None or _prints(error):
        print(redact_text(f"error: {line or BUG_MESSAGE}"), file=sys.stderr)


def _prints(error: Exception) -> bool:
    """Return whether this process prints the error, which other ranks may raise as well."""
    return (
        is_global_rank_zero()
        or isinstance(error, RankError)
        or (isinstance(error, HostError) and is_local_rank_zero())
    )


def _note_interrupts() -> list[int]:
    """Install a SIGINT handler that records the signal in the returned list and raises KeyboardInterrupt.

    Also suppress the traceback of a KeyboardInterrupt that nothing catches, and of Ctrl-C in exit handlers.
    """
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    def excepthook(kind: type[BaseException], *others: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("\ninterrupted", file=sys.stderr)
        else:
            before(kind, *others)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before, sys.excepthook = sys.excepthook, excepthook
        signal.signal(signal.SIGINT, note)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return noted


def _end_interrupted() -> NoReturn:
    if is_global_rank_zero():
        print("\ninterrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)


def _print_traceback(error: BaseException) -> None:
    print(redact_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def _check_directories() -> None:
    """Check the working directory and the home directory before libraries use them.

    Raises:
        HostError: if the working directory was deleted or is not accessible, or the home directory is unknown.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise HostError(
            f"the working directory cannot be found ({error.strerror}): change to an existing directory with `cd`"
        ) from error
    if os.path.expanduser("~") == "~":
        raise HostError("HOME is not set and the user has no home directory: set HOME to a directory to write to")
