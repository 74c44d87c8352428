# SPDX-License-Identifier: Apache-2.0
"""Staged outputs and listings of their directories."""

from pathlib import Path
from typing import Any

from bionemo.preparation.staged_output import stage_output

DIRECTORIES = ("val", "test", "train")


def make(directory: Path, *, force: bool = False, **parameters: Any) -> bool:
    """Prepare a tiny data set; return whether it was incomplete before."""
    with stage_output(directory, "tiny", {"seed": 0} | parameters, DIRECTORIES, force=force) as made:
        if made is None:
            return False
        for split in ("val", "train"):
            count = made.write_csv(f"{split}/x000.csv", ["id"], [[split], [parameters.get("seed", 0)]])
            tally = made.add_counts(split, split)
            tally.read = tally.written = count
        made.write("notes.txt", b"x")
    return True


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
