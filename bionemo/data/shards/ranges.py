# SPDX-License-Identifier: Apache-2.0
"""Names of data shards: `x[000..049]` stands for fifty files.

Brackets of any kind open a set: `[]`, `()`, `<>`, `{}`, and the words `_OP_` and `_CL_`, which need no quoting in a
shell or on a Hydra command line. A set is a range (`000..049`, `a..c`, `3..0`), a range with a step (`0..8..2`) or a
list (`000,003`); sets nest, and several in one name give every combination, the leftmost turning slowest.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from bionemo.common.errors import UserError

_OPENING = ("_OP_", "(", "[", "<", "{")
_CLOSING = ("_CL_", ")", "]", ">", "}")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_MAX_FILES = 100_000  # a slip such as x[0..99999999] must not fill the memory
_BOUNDS = re.compile(r"(-?\d+)\.\.(-?\d+)")
_SHOWN = 10


def expand_range(pattern: str | Sequence[str], extension: str) -> list[str]:
    """Expand a shard pattern, or several, into file names.

    Only the last component of a path is expanded: brackets in the name of a directory are part of that name.

    Args:
        pattern: one pattern (`x[000..049]`, `/data/run(1)/x000.csv`) or a list of them, whose results are joined.
        extension: ends every name, for example `.csv`; added where it is not there yet.

    Returns:
        File names (with the directory part, if the pattern had one) in the order of the pattern.

    Raises:
        UserError: unbalanced or empty brackets, compressed files, no text at all.
    """
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        return [name for each in pattern for name in expand_range(each, extension)]
    if not isinstance(pattern, str) or not pattern.strip():
        raise UserError(
            f"{pattern!r} is not a range of files: write text such as 'x000' or 'x[000..049]', or a list of it"
        )
    directory, slash, name = pattern.strip().rpartition("/")
    braces = _with_braces(name, pattern)
    # braceexpand makes a list of each single range before it gives its first name
    longest = max((abs(int(last) - int(first)) for first, last in _BOUNDS.findall(braces)), default=0)
    stems = [] if longest > _MAX_FILES else list(islice(braceexpand(braces, escape=False), _MAX_FILES + 1))
    if longest > _MAX_FILES or len(stems) > _MAX_FILES:
        raise UserError(f"the range '{pattern}' stands for more than {_MAX_FILES:,} files: check its bounds")
    # braceexpand keeps the braces of a set of one; x[0] is the one file x0
    stems = [stem.replace("{", "").replace("}", "") for stem in stems]
    names = [stem if stem.endswith(extension) else stem + extension for stem in stems]
    for stem in stems:
        if stem.endswith(_COMPRESSED):
            raise UserError(
                f"'{directory}{slash}{stem}' is compressed and cannot be memory-mapped: decompress it first"
            )
    return [f"{directory}{slash}{each}" for each in names]


def shard_paths(
    dataset_path: str | Path, split: str, pattern: str | Sequence[str], extension: str = ".csv"
) -> list[Path]:
    """Find the files of one split: `dataset_path/split/pattern`.

    Args:
        dataset_path: root of the data set.
        split: directory below it, such as `train`; empty if there is none.
        pattern: what `expand_range` takes; an absolute pattern is used as it is.
        extension: of the files, with its dot.

    Returns:
        Paths in the order of the pattern; all of them exist.

    Raises:
        UserError: naming every missing file (the first ten, and how many) and what the directory holds instead.
    """
    paths = [Path(dataset_path, split, name) for name in expand_range(pattern, extension)]
    missing = [path for path in paths if not path.exists()]
    if missing:
        folder = missing[0].parent
        elsewhere = any(path.parent != folder for path in missing)
        named = [str(path) if elsewhere else path.name for path in missing]
        raise UserError(
            f"{len(missing)} of {len(paths)} data files not found in {folder}: {_shorten(named)}; {_contents(folder)}"
        )
    return paths


def _with_braces(name: str, pattern: str) -> str:
    """Turn every kind of bracket into braces, and refuse those that do not pair."""
    text, opened, at = "", [], 0
    while at < len(name):
        bracket = next((token for token in _OPENING + _CLOSING if name.startswith(token, at)), None)
        if bracket is None:
            text += name[at]
        elif bracket in _OPENING:
            text += "{"
            opened.append(bracket)
        elif not opened:
            raise UserError(f"unbalanced '{bracket}' in the range '{pattern}': nothing opens it")
        else:
            if text.endswith("{"):
                raise UserError(
                    f"empty '{opened[-1]}{bracket}' in the range '{pattern}': name files, as in x[000..003]"
                )
            text += "}"
            opened.pop()
        at += len(bracket or " ")
    if opened:
        raise UserError(f"unbalanced '{opened[-1]}' in the range '{pattern}': nothing closes it")
    return text


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _contents(folder: Path) -> str:
    """Say in words what a directory holds."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if ".idx-" not in entry.name)  # indexes of ours
    except FileNotFoundError:
        return "that directory does not exist"
    except OSError as error:
        return f"that directory cannot be read ({error.strerror})"
    return f"it holds {_shorten(names)}" if names else "it is empty"
