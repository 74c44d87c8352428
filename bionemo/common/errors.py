# SPDX-License-Identifier: Apache-2.0
"""Errors caused by users, files or machines, and their description in one line."""

import errno
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_RETRY = "run the command again"
WORKER_ADVICE = (
    "check the memory of the machine and the size of /dev/shm (docker run --shm-size), or set model.data.num_workers=0"
)
_HINTS = {
    errno.ENOSPC: f"free disk space or choose another output directory, then {_RETRY}",
    errno.EDQUOT: f"free disk space or raise the quota, then {_RETRY}",
    errno.EACCES: "check the permissions and the owner",
    errno.EPERM: "check the permissions and the owner",
    errno.EROFS: "choose an output directory on a writable file system",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file",
    errno.EMFILE: "raise the hard limit of open files (`ulimit -Hn`)",
    errno.ENFILE: "close other programs, or raise the limit of open files",
    errno.EIO: f"check the disk or the network file system, then {_RETRY}",
    errno.ESTALE: f"check the network file system, then {_RETRY}",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOMEM: "free memory or use a smaller model or batch",
}
# errors of libraries caused by files or the machine: patterns of class name and message, advice
_LIBRARY_ERRORS = [
    (r"(torch\.\w+|builtins\.RuntimeError)", r"out of memory|can't allocate memory", "set a smaller micro_batch_size"),
    (
        r"builtins\.RuntimeError",
        r"^DataLoader worker .* Bus error",
        f"a data file was truncated while it was read, or /dev/shm is full: restore the file, or {WORKER_ADVICE}",
    ),
    (r"builtins\.RuntimeError", r"^(DataLoader (worker \(pid|timed out)|Pin memory thread exited)", WORKER_ADVICE),
    (r"builtins\.RuntimeError", r"unable to .*(</?torch_|shm|shared memory)", WORKER_ADVICE),
    (r"builtins\.RuntimeError", r"PytorchStreamWriter|file write failed|unexpected pos", _HINTS[errno.ENOSPC]),
    (r"builtins\.RuntimeError", r"No space left on device", _HINTS[errno.ENOSPC]),
    (r"safetensors\..*", r"", "the file is damaged: use another one, or write it again"),
    (r"pyarrow\..*", r"", "check the file"),
]
# torch re-raises an error of a data worker as the same class, with the traceback as its message
_WORKER_ERROR = re.compile(
    r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback.*\n(?:[\w.]+\.)?\1(?:: (.*))?", re.DOTALL
)
_OS_ERROR = re.compile(r"\[Errno (\d+)\] (.*?)(?:: '(.*)')?")


class UserError(Exception):
    """An error that the user can fix; its text is one line that says what is wrong, where, and what to do.

    Commands print the text and exit with status 1.
    """


class HostError(UserError):
    """A UserError that may occur on one host of a run only: the first process of every host prints it.

    Any other UserError is printed by rank 0 only, because all ranks raise it.
    """


class RankError(HostError):
    """A UserError that may occur in one process of a run only: every process prints it."""


@contextmanager
def reraise_as(error_type: type[HostError]) -> Iterator[None]:
    """Convert errors that `describe` explains to `error_type`, with the same text.

    Raises:
        HostError: an error of type `error_type` instead of the original one.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HostError) or (line := describe(error)) is None:
            raise
        raise error_type(line) from error


def describe(error: BaseException) -> str | None:
    """Return a one-line description of an error; None for an error that indicates a bug in bionemo.

    The description of a UserError is its text. For other errors this function is the fallback of commands: code that
    knows which setting to change raises a UserError.
    """
    message = _message(error)
    if isinstance(error, UserError):
        text = message
    elif isinstance(error, OSError):
        text = _os_error(error, message)
    elif isinstance(error, MemoryError):
        text = f"out of memory: {_HINTS[errno.ENOMEM]}"
    else:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        known = [
            hint for type_, text, hint in _LIBRARY_ERRORS if re.fullmatch(type_, name) and re.search(text, message)
        ]
        if not known:
            return None
        text = f"{message.splitlines()[0].rstrip('.') if message else name}: {known[0]}"
    return " ".join(text.split())


def _message(error: BaseException) -> str:
    """Return the message of an error; for an error of a data worker, its message there."""
    message = str(error).strip()
    match = _WORKER_ERROR.fullmatch(message)
    return (match[2] or "") if match else message


def _os_error(error: OSError, message: str) -> str:
    if error.errno is None and (match := _OS_ERROR.fullmatch(message)):
        error = OSError(int(match[1]), match[2], *match.groups()[2:])
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or message or type(error).__name__
    hint = _HINTS.get(error.errno or 0, f"check the file system, then {_RETRY}")
    return f"{files}: {reason}: {hint}" if files else f"{reason}: {hint}"


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra; PyPI has another package with the name bionemo."""
    from importlib import metadata  # 20 ms

    try:
        requirements = metadata.requires("bionemo") or []
    except metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in its checkout"
    packages = [text.partition(";")[0] for text in requirements if text.endswith(f"extra == '{extra}'")]
    return " ".join(["pip install", *(f"'{package.strip()}'" for package in packages)])


@contextmanager
def optional_dependency(extra: str, use: str) -> Iterator[None]:
    """Replace an ImportError in a `with` block by a UserError with the command that installs an extra of this package.

    Args:
        extra: name of the extra, as in pyproject.toml.
        use: what needs it; the subject of the message.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{use} requires the extra '{extra}' of bionemo ({error}): {install_command(extra)}"
        ) from error


def shorten(text: str, length: int = 40) -> str:
    """Return a text in quotes for a message, cut to at most `length` characters."""
    return repr(text if len(text) <= length else text[: length - 3] + "...")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
