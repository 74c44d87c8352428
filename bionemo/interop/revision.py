# SPDX-License-Identifier: Apache-2.0
"""Which revision of this package a run is of."""

import subprocess
from pathlib import Path

from bionemo.common.version import __version__


def revision() -> str:
    """The version; in a checkout its commit, and the names of files that differ from it, but not what they hold."""
    here = Path(__file__).parent
    hashed, changed = _git(here, "rev-parse", "HEAD"), _git(here, "status", "--short", "--untracked-files=no")
    lines = [f"bionemo {__version__}"]
    if hashed and changed is not None:
        lines += [f"commit hash: {hashed}", *changed.splitlines()]
    return "\n".join(lines) + "\n"


def _git(directory: Path, *words: str) -> str | None:
    """What git says of the repository around a directory; None without git, or a repository."""
    try:
        answer = subprocess.run(["git", "-C", directory, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
