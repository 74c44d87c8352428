# SPDX-License-Identifier: Apache-2.0
"""Errors of users, files and machines are one line; defects of the project print a traceback."""

import errno

import pytest
from torch._utils import ExceptionWrapper

from bionemo.common.console import BUG_MESSAGE, one_line_errors
from bionemo.common.errors import UserError, describe


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("a\n b"), "a b"),
        (OSError(errno.ENOSPC, "No space left on device", "x.pt"), "x.pt: No space left on device: free disk space"),
        (OSError(errno.EACCES, "Permission denied", "x.pt"), "x.pt: Permission denied: check the permissions"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "DataLoader worker (pid 7) is killed",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"),
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that: a data file was truncated",
        ),
        (MemoryError(), "out of memory"),
    ],
)
def test_one_line(error: BaseException, expected: str) -> None:
    line = describe(error)
    assert line is not None
    assert line.startswith(expected)
    assert "\n" not in line


def test_a_safetensors_error_names_the_file() -> None:
    from safetensors import SafetensorError

    assert "damaged" in (describe(SafetensorError("header too large")) or "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("x.fasta: no sequence"), "x.fasta: no sequence"),
        (UserError("a:\n b: c"), "a: b: c"),
        (MemoryError(), "out of memory: "),
        (
            FileNotFoundError(2, "No such file or directory", "x.fasta"),
            "x.fasta: No such file or directory: check the",
        ),
        (OSError("closed"), "closed: check the file system"),
        (
            RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"),
            "unable to write to file",
        ),
        (RuntimeError("shape mismatch"), None),
        (ValueError("defect"), None),
    ],
)
def test_an_error_of_a_data_worker_is_described_as_in_the_main_process(error: Exception, expected: str | None) -> None:
    """torch raises it again with the worker's traceback as its message."""
    try:
        raise error
    except Exception:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(type(error)) as caught:
        wrapped.reraise()
    line = describe(caught.value)
    if expected is None:
        assert line is None
    else:
        assert line is not None
        assert line.startswith(expected)
        assert "Traceback" not in line


def test_full_shared_memory_is_not_reported_as_a_full_disk() -> None:
    error = RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)")
    assert "/dev/shm" in (describe(error) or "")


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shape mismatch"), AssertionError()])
def test_a_defect_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(error) is None
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise error
    assert end.value.code == 1
    error_output = capsys.readouterr().err
    assert "Traceback" in error_output
    assert error_output.rstrip().endswith(BUG_MESSAGE)
