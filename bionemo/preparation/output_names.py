# SPDX-License-Identifier: Apache-2.0
"""Names of the files that preparations write; names read from a manifest or a list of moves are checked with them."""

import re

MANIFEST = "manifest.json"
DIRECTORIES = frozenset({"train", "val", "test", "uf50", "uf90"})
"""Names of the directories at the top of an output."""
STAGING_PREFIX = ".preparing-"
_SHARD = re.compile(
    r"((uf50/)?(train|val|test)|uf90/uf90_csvs)/x[0-9]{3,9}\.csv"
    r"|(train|val|test)/data\.csv|uf50/train/(starts|counts)\.mmap"
)


def is_shard(name: str) -> bool:
    """Return whether a path relative to the output is a data file in one of the directories."""
    return _SHARD.fullmatch(name) is not None


def is_top_level(name: str) -> bool:
    """Return whether a name is valid for a file at the top of the output: a readme, or a copy of a raw file."""
    return (
        0 < len(name) < 256
        and name.isprintable()
        and not {"/", "\0"} & set(name)
        and name not in {".", "..", MANIFEST, *DIRECTORIES}
        and not name.startswith(STAGING_PREFIX)
    )


def is_output(name: str) -> bool:
    """Return whether a preparation can write a file with this path relative to the output."""
    return is_shard(name) or is_top_level(name)
