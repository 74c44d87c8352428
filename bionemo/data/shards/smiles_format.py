# SPDX-License-Identifier: Apache-2.0
"""Find the columns of a SMILES file from its first lines.

Most files have a SMILES in each line, then white space and a name. The name is the rest of the line: it may be
missing, and it may contain spaces, commas, quotes and tabs. Other files are tables with columns in any order.
"""

import csv
import logging
import re
from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

from bionemo.common.errors import UserError, shorten
from bionemo.data.columns import SMILES, find_id_column, find_sequence_columns, find_smiles_columns
from bionemo.data.shards.formats import BYTE_ORDER_MARK, CARRIAGE_RETURN
from bionemo.tokenizers.smiles import end_at_space

_log = logging.getLogger(__name__)
HEAD_BYTES = 64 << 10  # of the beginning of a file that contains the lines that are examined
_EXAMINED_LINES = 64
_ENOUGH = 0.5  # share of SMILES in a column
_SEPARATORS = ("\t", ",", ";", "")  # "": white space
_BRACKETS, _RING_NUMBERS = re.compile(r"\[[^\]]*\]"), re.compile(r"%\d\d|\d")
_EXTENSIONS = re.compile(r"\|[^|]*\|(?:\s+|$)")  # between a SMILES and its name


Column = str | int | None
"""Title of a column, as in the file, or its number from 0; None: the column is found."""


class SmilesFormat(NamedTuple):
    """Columns of a SMILES file, and its first record; a `TextFormat`."""

    separator: str  # between columns; "": white space
    smiles: int  # column of the SMILES
    name: int | None  # column of the names; None: there are none, or, if `has_rest`, the rest of the line
    columns: int  # number of columns in the first line
    skipped: int  # lines before the first record: title, comments and blank lines
    titles: tuple[str, ...] = ()  # of the columns; () if there is no title line

    @property
    def proteins(self) -> bool:
        """See TextFormat."""
        return False

    @property
    def spec(self) -> dict[str, Any]:
        """See TextFormat."""
        return {"format": "smiles", **self._replace(titles=())._asdict()}

    def find_start(self, data: mmap, path: Path) -> int:
        """See TextFormat."""
        start = len(BYTE_ORDER_MARK) if data[:3] == BYTE_ORDER_MARK else 0
        for _ in range(self.skipped):
            start = data.find(b"\n", start) + 1 or len(data)
        return start

    def find_boundary(self, data: mmap) -> None:
        """See TextFormat."""

    def index_block(self, block: bytes) -> None:
        """See TextFormat."""

    def records(self, data: mmap, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """See TextFormat."""
        while start < stop:
            end = data.find(b"\n", start, stop) + 1 or stop
            yield start, data[start:end]
            start = end

    def sequence(self, record: bytes) -> bytes | None:
        """See TextFormat."""
        line = record.rstrip(b"\r\n")
        if b"\r" in line:
            raise ValueError(CARRIAGE_RETURN)
        found = self.split(line.decode())
        return None if found is None else found[0].encode()

    def fields(self, record: bytes) -> dict[str, str]:
        """Return `sequence` and `id`, which may be empty."""
        smiles, name = self.split(record.decode()) or ("", "")
        return {"sequence": smiles, "id": name}

    @property
    def has_rest(self) -> bool:
        """Whether each line is a SMILES, white space and the name."""
        return not self.separator and self.smiles == 0 and self.name is None

    def problem(self, columns: int) -> str | None:
        """Return what is wrong with a line of so many columns, for messages; None if it has all that are needed."""
        if columns <= max(self.smiles, self.name or 0):
            missing = "a molecule without an id" if columns > self.smiles else "a line without a SMILES"
            return f"{missing} ({columns} of {self.columns} columns): complete the line, or remove it"
        if not self.separator and columns != self.columns:
            return f"{columns} columns instead of {self.columns}: separate the columns with tabs"
        return None

    def split(self, line: str) -> tuple[str, str] | None:
        """Return SMILES and name ("" if there is none) of a line; None for blank lines and comments.

        Raises:
            ValueError: see `problem`.
        """
        if not line.strip() or (self.smiles == 0 and line.lstrip().startswith("#")):
            return None
        if self.has_rest:
            smiles, *rest = line.split(None, 1)
            return smiles, remove_extensions(rest[0].strip()) if rest else ""
        cells = split_cells(line, self.separator)
        if problem := self.problem(len(cells)):
            raise ValueError(problem)
        return end_at_space(cells[self.smiles]), cells[self.name] if self.name is not None else ""


def remove_extensions(name: str) -> str:
    """Remove the extensions of CXSMILES, which are between a SMILES and its name, as in `CCO |$_R1;;$| ethanol`."""
    return name[extensions.end() :] if (extensions := _EXTENSIONS.match(name)) else name


def split_cells(line: str, separator: str) -> list[str]:
    """Split a line at a separator; cells may be quoted unless it is white space or a tab."""
    quoted = separator in (",", ";") and '"' in line
    cells = next(csv.reader([line], delimiter=separator)) if quoted else line.split(separator or None)
    return [cell.strip() for cell in cells]


def find_formats(
    paths: Sequence[Path], key: str | None = None, smiles: Column = None, name: Column = None
) -> list[SmilesFormat]:
    """Find the columns of files; see `find_format`, also for the errors."""
    heads = []
    for path in paths:
        try:
            with path.open("rb") as file:
                heads.append(file.read(HEAD_BYTES))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    return [find_format(head, str(path), key, smiles, name) for path, head in zip(paths, heads, strict=True)]


def find_format(head: bytes, path: str, key: str | None, smiles: Column = None, name: Column = None) -> SmilesFormat:
    """Find the columns by the titles in the first line, or else by the cells.

    Args:
        head: the first HEAD_BYTES of the file.
        path: path or URL of the file, for messages.
        key: configuration key of `smiles`, for messages; None: there is none.
        smiles: column of the SMILES.
        name: column of the names.

    Raises:
        UserError: if a column is missing or no column has SMILES.
    """
    lines = head.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").split("\n")
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()  # incomplete
    filled = [(number, line.rstrip()) for number, line in enumerate(lines, 1) if line.strip()][:_EXAMINED_LINES]
    records = [(number, line) for number, line in filled if not line.lstrip().startswith("#")]
    texts = [line for _, line in records]
    if any(_EXTENSIONS.search(text) and not text.startswith("|") for text in texts):
        _log.warning("%s: extensions of CXSMILES (|...|) are not read", path)
    for number, line in filled[:1]:
        if found := _read_titles(line, texts, smiles):
            return _describe(*found, name, number, path)
    if not records:
        return SmilesFormat("", 0, None, 1, len(lines))
    separator, column = _find_molecules(texts, smiles, path, key)
    first = split_cells(texts[0], separator)
    is_title = len(texts) > 1 and not _has_letters_of_smiles(first[column])
    if is_title:
        _log.warning("%s:%d: %s is read as a line of titles", path, records[0][0], shorten(texts[0]))
    return _describe(separator, column, first, is_title, name, records[0][0] - (not is_title), path)


def _read_titles(first: str, texts: Sequence[str], smiles: Column) -> tuple[str, int, list[str], bool] | None:
    """Return separator, column of the SMILES, titles and True if the first line names the column, else None."""
    for separator in _SEPARATORS:
        titles = split_cells(first.lstrip("# "), separator)
        given = [number for number, title in enumerate(titles) if title == smiles]
        columns = given or (find_smiles_columns(titles) if _is_usual(smiles) else [])
        if not columns or (separator and len(titles) == 1):
            continue
        rows = [split_cells(text, separator) for text in texts if text != first]
        is_doubtful = first.startswith("#") or _is_molecule(titles[0])  # a comment, or a molecule named `smiles`
        if given or not is_doubtful or any(_is_molecule(row[columns[0]]) for row in rows if len(row) > columns[0]):
            return separator, columns[0], titles, True
    return None


def _is_usual(smiles: Column) -> bool:
    """Return whether a title is one that is found anyway, so that a file without it can be read."""
    return smiles is None or bool(find_sequence_columns([str(smiles)]))


def _find_molecules(texts: Sequence[str], smiles: Column, path: str, key: str | None) -> tuple[str, int]:
    """Return separator and column of most SMILES in lines without titles; preferably the first word of each line."""
    width = {separator: len(split_cells(texts[0], separator)) for separator in _SEPARATORS}
    columns = [
        ("", 0),
        *((each, number) for each in _SEPARATORS for number in range(width[each]) if width[each] > 1 or not each),
    ]
    if not _is_usual(smiles):
        columns = [(separator, number) for separator, number in columns if str(number) == str(smiles)]
    best, found = 0.0, None
    for separator, number in columns:
        rows = [split_cells(text, separator) for text in texts]
        share = sum(_is_molecule(row[number]) for row in rows if number < len(row)) / len(rows)
        if share > best:
            best, found = share, (separator, number)
        if best >= _ENOUGH:
            break
    if found is None:
        problem = (
            f"no SMILES in column {columns[0][1] + 1} of {path}" if columns else f"{path} has no column {smiles!r}"
        )
        remedy = f"set {key} to its title, or its number from 0" if key else "give it the title smiles"
        raise UserError(f"{problem} (first line {shorten(texts[0])}): if another column has them, {remedy}")
    return found


def _describe(
    separator: str, smiles: int, cells: Sequence[str], is_title: bool, name: Column, skipped: int, path: str
) -> SmilesFormat:
    """Find the column of the names; `cells` are those of the first line."""
    titles = [*cells] if is_title else []
    found = SmilesFormat(separator, smiles, None, len(cells), skipped, tuple(titles))
    if name is not None and (str(name).isdecimal() or find_id_column([str(name)], proteins=False) is None):
        number = int(name) if str(name).isdecimal() else titles.index(name) if name in titles else len(cells)
        if number >= len(cells):
            columns = ", ".join(map(shorten, cells[:8]))
            raise UserError(f"{path} has no column {name!r}, but {columns}: correct the column of the ids")
        return found._replace(name=number)
    if not is_title and smiles == 0 and separator == "\t":
        found = found._replace(separator="")  # a name may contain tabs, too
    others = [number for number in range(len(cells)) if number != smiles]
    if found.has_rest or not others:
        return found
    column = (
        titles.index(name) if name in titles else find_id_column(titles, proteins=False) if is_title else others[0]
    )
    return found._replace(name=others[0] if column is None and len(others) == 1 and separator != "," else column)


def _is_molecule(text: str) -> bool:
    """Return whether a text has the form of a SMILES, with closed rings and branches."""
    atoms = _BRACKETS.sub("*", text)
    rings = _RING_NUMBERS.findall(atoms)
    closed = atoms.count("(") == atoms.count(")") and all(rings.count(ring) % 2 == 0 for ring in set(rings))
    return closed and _has_letters_of_smiles(text)


def _has_letters_of_smiles(text: str) -> bool:
    """Return whether a text begins with an atom, consists of symbols of SMILES, and is not a word in lower case."""
    is_word = text.isalpha() and text.islower()  # aromatic atoms occur in rings only, which have numbers
    return (text[:1].isalpha() or text[:1] in ("[", "*")) and not is_word and SMILES.cell.fullmatch(text) is not None
