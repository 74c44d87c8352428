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
_BRACKET = re.compile(f"({'|'.join(map(re.escape, _OPENING + _CLOSING))})")
_WRONG_RANGE = re.compile(r"\{((\d+)(?:[-:~]|\.{3,})(\d+))\}")  # converted; two numbers in brackets, with another sign
_LITERAL_BRACES = str.maketrans("{}", "\0\1")  # braces that braceexpand must not see
_FINAL_BRACES = str.maketrans("\0\1", "{}", "{}")
_MAX_LISTED = 10
INDEX = re.compile(r"(\.(idx|rows)-[0-9a-f]{8})+$")  # end of the name of an index, or of the rows of a parquet file


def expand_range(pattern: str | Sequence[str], extension: str) -> list[str]:
    """Expand a shard pattern, or several, into paths in the order of the pattern.

    Directory names can contain ranges and lists, too; other brackets in them are literal, as in
    `/data/run(1)/x000.csv`. An extension such as `.csv` is added to names that end neither with it nor with `.gz`.

    Raises:
        UserError: if brackets are unbalanced or empty, a range is written with other signs than two dots, or the
            pattern is empty or not text.
    """
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        return [name for each in pattern for name in expand_range(each, extension)]
    if not isinstance(pattern, str) or not pattern.strip():
        raise UserError(
            f"{pattern!r} is not a range of files: write text such as 'x000' or 'x[000..049]', or a list of it"
        )
    braces = _convert_brackets(pattern.strip())
    if wrong := _WRONG_RANGE.search(braces):
        raise UserError(
            f"'{wrong[1]}' in '{pattern}' is not a range: write {wrong[2]}..{wrong[3]}, as in x[000..003] or "
            "x_OP_000..003_CL_"
        )
    # braceexpand builds a list of every range before it yields the first name
    largest = max((abs(int(last) - int(first)) for first, last in _BOUNDS.findall(braces)), default=0)
    stems = [] if largest > _MAX_FILES else list(islice(braceexpand(braces, escape=False), _MAX_FILES + 1))
    if largest > _MAX_FILES or len(stems) > _MAX_FILES:
        raise UserError(f"the range '{pattern}' expands to more than {_MAX_FILES:,} files: check its bounds")
    # braceexpand keeps the braces of a set with one element; x[0] is the file x0
    stems = [stem.translate(_FINAL_BRACES) for stem in stems]
    return [stem if stem.endswith((extension, *COMPRESSED)) else stem + extension for stem in stems]


def shard_paths(
    dataset_path: str | Path, split: str, pattern: str | Sequence[str], extension: str = ".csv"
) -> list[Path]:
    """Return the existing files of one split, `dataset_path/split/pattern`, in the order of the pattern.

    An absolute pattern replaces the directories; see `expand_range`. A dataset path with sets is expanded, too, unless
    there is a directory of this name.

    Raises:
        UserError: if files are missing; lists the first ten of them and the content of the directory. If one is
            compressed.
    """
    directory = str(Path(dataset_path, split))
    directories = [directory] if Path(dataset_path).is_dir() else expand_range(directory, "")
    names = expand_range(pattern, extension)
    repeated = [name for name in names if not Path(name).is_absolute()]
    paths = [Path(directories[0], name) for name in names]
    paths += [Path(other, name) for other in directories[1:] for name in repeated]
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
            f"{len(missing)} of {len(paths)} data files not found in {folder}: {list_names(named)}; "
            f"{_describe_directory(folder)}{remedy}"
        )
    return paths


def _convert_brackets(pattern: str) -> str:
    """Convert the brackets of sets to braces. In directory names, those that enclose no range or list are literal.

    Raises:
        UserError: if brackets in the name of the file are unbalanced or empty.
    """
    tokens = [token for token in _BRACKET.split(pattern) if token]
    last_slash = max((index for index, token in enumerate(tokens) if "/" in token), default=-1)
    converted = [token.translate(_LITERAL_BRACES) for token in tokens]
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token in _OPENING:
            opened.append(index)
        elif token in _CLOSING and opened:
            start = opened.pop()
            content = "".join(tokens[start + 1 : index])
            if index > last_slash and not content:
                raise UserError(
                    f"empty '{tokens[start]}{token}' in the range '{pattern}': name files, as in x[000..003]"
                )
            if index > last_slash or ".." in content or "," in content or token == "_CL_":
                converted[start], converted[index] = "{", "}"
        elif token in _CLOSING and index > last_slash:
            raise UserError(f"unbalanced '{token}' in the range '{pattern}': the opening bracket is missing")
    if opened and opened[-1] > last_slash:
        raise UserError(f"unbalanced '{tokens[opened[-1]]}' in the range '{pattern}': the closing bracket is missing")
    return "".join(converted)


def list_names(names: Sequence[str]) -> str:
    """Return the first ten names and the number of the others, for messages."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _describe_directory(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not INDEX.search(entry.name))
    except FileNotFoundError:
        return "that directory does not exist"
    except OSError as error:
        return f"that directory cannot be read ({error.strerror})"
    return f"it contains {list_names(names)}" if names else "it is empty"
