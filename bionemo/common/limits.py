# SPDX-License-Identifier: Apache-2.0
"""Limits of the system on open files and on the address space of a process."""

import resource
from contextlib import suppress

from bionemo.common.errors import HostError

_FEWEST_FILES = 256  # a run on one device opens about 100 besides its data
_MOST_FILES = 1 << 20  # enough for every data set
_SMALLEST_SPACE = 3 << 30  # bytes, with which a tiny model trains on a CPU


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: every shard of a data set keeps two files open.

    Raises:
        HostError: if the hard limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if max(soft, wanted) < _FEWEST_FILES:
        raise HostError(
            f"a process can open only {hard} files here (`ulimit -Hn`), expected at least {_FEWEST_FILES}, and two "
            "more for every file of data: raise the limit in the shell, the container or limits.conf"
        )


def check_address_space() -> None:
    """Check that torch fits into the address space of this process, before it is loaded.

    Raises:
        HostError: if the limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _SMALLEST_SPACE:
        command = "ulimit -v unlimited" if hard == resource.RLIM_INFINITY else "on another machine, or in a job"
        raise HostError(
            f"the address space of a process is limited to {soft / 2**30:.1f} GiB here (`ulimit -v`), expected at "
            f"least {_SMALLEST_SPACE >> 30} GiB, and tens of GiB with a GPU: run {command}"
        )
