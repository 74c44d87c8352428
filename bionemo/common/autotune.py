# SPDX-License-Identifier: Apache-2.0
"""Autotuning: choose the fastest implementation on this machine and store the choice in the user's cache directory.

The implementations differ in rounding, so every process of a user must make the same choice: the first process that
stores its measurement decides. Imports nothing heavy.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

_REPETITIONS = 3
_CPU_FIELDS = ("vendor_id", "model name", "cache size", "flags")  # of /proc/cpuinfo
log = logging.getLogger(__name__)


def autotune(name: str, version: str, candidates: Mapping[str, Callable[[], object]]) -> str:
    """Return the name of the fastest candidate.

    Args:
        name: name of the choice, part of a file name.
        version: everything besides the CPU that the speeds depend on, such as versions of libraries.
        candidates: functions that take milliseconds. If the cache directory cannot be written, nothing is measured
            and the first candidate is chosen, so that equal commands give equal results.
    """
    label = blake2b("\n".join((version, *candidates, _describe_cpu())).encode(), digest_size=8).hexdigest()
    default = next(iter(candidates))
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "bionemo", "autotune")
    except RuntimeError:  # the user has no home directory
        return default
    path = directory / f"{name}-{label}"
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".") as file:
                file.write(f"{_measure(name, candidates)}\n")
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        choice = path.read_text(errors="replace").strip()
    except OSError as error:
        log.debug("%s: %s, because no measurement can be stored (%s)", name, default, error)
        return default
    return choice if choice in candidates else default


def _measure(name: str, candidates: Mapping[str, Callable[[], object]]) -> str:
    """Return the candidate with the shortest time; the candidates take turns, because other processes interfere."""
    times = dict.fromkeys(candidates, float("inf"))
    for repetition in range(1 + _REPETITIONS):  # the first is not measured
        for each, function in candidates.items():
            start = time.perf_counter()
            function()
            if repetition:
                times[each] = min(times[each], time.perf_counter() - start)
    choice = min(times, key=lambda each: times[each])
    log.info("%s: %s (%s)", name, choice, ", ".join(f"{each} {1e3 * t:.1f} ms" for each, t in times.items()))
    return choice


def _describe_cpu() -> str:
    """Return the lines of /proc/cpuinfo that describe the first core, as far as they matter for speed."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first_core = file.read().split("\n\n", 1)[0].splitlines()
        return "\n".join(line for line in first_core if line.startswith(_CPU_FIELDS))
    return ""
