# SPDX-License-Identifier: Apache-2.0
"""Let OpenMP threads sleep soon while they wait for other threads.

By default, a thread of libgomp, the OpenMP runtime of torch, repeats a loop 300,000 times before it sleeps. If another
process needs one of the cores, the thread for which it waits does not run meanwhile, and each parallel operation takes
a time slice of the scheduler. Training then was ten times slower, and that of a small head a hundred times, beside one
busy process on two cores.
"""

import os

_SPIN_COUNT = "GOMP_SPINCOUNT"
_ROUNDS = "1000"  # a few microseconds; with 0, idle cores wait for the scheduler in short operations


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY.

    libgomp reads the variable when it is loaded, so this has no effect in a process that has imported torch before.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault(_SPIN_COUNT, _ROUNDS)
