# SPDX-License-Identifier: Apache-2.0
"""Let OpenMP threads sleep soon while they wait for other threads.

By default, a thread of libgomp, the OpenMP runtime of torch, repeats a loop 300,000 times before it sleeps. If another
process uses one of the cores, the looping thread keeps the other core from the thread that it waits for, and each
parallel operation takes a time slice of the scheduler. Beside one busy process on two cores, training was 5 to 16
times slower, and training of a head 40 to 120 times.
"""

import os

_SPIN_COUNT = "1000"  # a few microseconds; with 0, short operations are slower on idle cores


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY.

    libgomp reads the variable when it is loaded, so this has no effect in a process that has imported torch before.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
