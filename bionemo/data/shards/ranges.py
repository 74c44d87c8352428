# SPDX-License-Identifier: Apache-2.0
"""Expand shard patterns: `x[000..049]` expands to fifty files.

A set is written in any brackets: `[]`, `()`, `<>`, `{}`, or `_OP_` and `_CL_`, which need no quotes in a shell or on a
Hydra command line. It is a range (`000..049`, `a..c`, `3..0`), a range with a step (`0..8..2`) or a
list (`000,003`). Sets can be nested, and several in one name give every combination, the leftmost varying slowest.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from bionemo.common.errors import UserError
from bionemo.data.shards.compressed import COMPRESSED, refuse_compressed

_OPENING = ("_OP_", "(", "[", "<", "{")
_CLOSING = ("_CL_", ")", "]", ">", "}")
_MAX_FILES = 100_000  # a typing error such as x[0..99999999] must not fill the memory
_BOUNDS = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MAX_LISTED = 10
INDEX = re.compile(r"\.idx-[0-9a-f]{8}$")  # end of the name of an index


def expand_range(pattern: str | Sequence[str], extension: str) -> list[str]:
    """Expand a shard pattern, or several, into file names in the order of the pattern, with its directory.

    Only the last component of a path is expanded; brackets in directory names are literal, as in
    `/data/run(1)/x000.csv`. An extension such as `.csv` is added to names that end neither with it nor with `.gz`.

    Raises:
        UserError: if brackets are unbalanced or empty, or the pattern is empty or not text.
    """
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        return [name for each in pattern for name in expand_range(each, extension)]
    if not isinstance(pattern, str) or not pattern.strip():
        raise UserError(
            f"{pattern!r} is not a range of files: write text such as 'x000' or 'x[000..049]', or a list of it"
        )
    directory, slash, name = pattern.strip().rpartition("/")
    braces = _convert_brackets(name, pattern)
    # braceexpand builds a list of every range before it yields the first name
    largest = max((abs(int(last) - int(first)) for first, last in _BOUNDS.findall(braces)), default=0)
    stems = [] if largest > _MAX_FILES else list(islice(braceexpand(braces, escape=False), _MAX_FILES + 1))
    if largest > _MAX_FILES or len(stems) > _MAX_FILES:
        raise UserError(f"the range '{pattern}' expands to more than {_MAX_FILES:,} files: check its bounds")
    # braceexpand keeps the braces of a set with one element; x[0] is the file x0
    stems = [stem.replace("{", "").replace("}", "") for stem in stems]
    names = [stem if stem.endswith((extension, *COMPRESSED)) else stem + extension for stem in stems]
    return [f"{directory}{slash}{each}" for each in names]


def shard_paths(
    dataset_path: str | Path, split: str, pattern: str | Sequence[str], extension: str = ".csv"
) -> list[Path]:
    """Return the existing files of one split, `dataset_path/split/pattern`, in the order of the pattern.

    An absolute pattern replaces the directories; see `expand_range`.

    Raises:
        UserError: if files are missing; lists the first ten of them and the content of the directory. If one is
            compressed.
    """
    paths = [Path(dataset_path, split, name) for name in expand_range(pattern, extension)]
    for path in paths:
        if path.suffix in COMPRESSED:
            refuse_compressed(path)
    missing = [path for path in paths if not path.exists()]
    if missing:
        folder = missing[0].parent
        elsewhere = any(path.parent != folder for path in missing)
        named = [str(path) if elsewhere else path.name for path in missing]
        some = len(missing) < len(paths) and not elsewhere
        remedy = f"; set model.data.dataset.{split} to files that exist, such as x[000..003]" if some else ""
        raise UserError(
            f"{len(missing)} of {len(paths)} data files not found in {folder}: {_list_names(named)}; "
            f"{_describe_directory(folder)}{remedy}"
        )
    return paths


def _convert_brackets(name: str, pattern: str) -> str:
    """Convert all brackets to braces, and check that they are balanced and not empty."""
    text, opened, offset = "", [], 0
    while offset < len(name):
        bracket = next((token for token in _OPENING + _CLOSING if name.startswith(token, offset)), None)
        if bracket is None:
            text += name[offset]
        elif bracket in _OPENING:
            text += "{"
            opened.append(bracket)
        elif not opened:
            raise UserError(f"unbalanced '{bracket}' in the range '{pattern}': the opening bracket is missing")
        else:
            if text.endswith("{"):
                raise UserError(
                    f"empty '{opened[-1]}{bracket}' in the range '{pattern}': name files, as in x[000..003]"
                )
            text += "}"
            opened.pop()
        offset += len(bracket or " ")
    if opened:
        raise UserError(f"unbalanced '{opened[-1]}' in the range '{pattern}': the closing bracket is missing")
    return text


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _describe_directory(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not INDEX.search(entry.name))
    except FileNotFoundError:
        return "that directory does not exist"
    except OSError as error:
        return f"that directory cannot be read ({error.strerror})"
    return f"it contains {_list_names(names)}" if names else "it is empty"
