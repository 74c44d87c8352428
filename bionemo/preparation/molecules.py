# SPDX-License-Identifier: Apache-2.0
"""Find and download SMILES files, read them in blocks of lines, and canonicalise SMILES with RDKit."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError, optional_dependency
from bionemo.common.redaction import redact_text
from bionemo.data.files import SMILES_EXTENSIONS
from bionemo.data.molecules.smiles import MAX_PARSED, parse_smiles, write_canonical
from bionemo.data.shards.formats import CARRIAGE_RETURN
from bionemo.data.shards.smiles_format import HEAD_BYTES, Column, SmilesFormat, find_format
from bionemo.preparation.download import fetch
from bionemo.preparation.inputs import LineBlock, is_gzipped, notify_dropped_columns, read_head, read_line_blocks
from bionemo.preparation.urls import destination, download_directory, is_url, redact_url

with optional_dependency("molecules", "SMILES"):
    from rdkit import Chem

log = logging.getLogger(__name__)
_SUFFIXES = (".txt", ".csv", ".tsv", *SMILES_EXTENSIONS)
_PARALLEL_DOWNLOADS = 8  # tranches are small, so latency dominates
_MAX_FAILURES = 24  # after which the remaining files are not downloaded: the server or the network is down
_MAX_LIST_BYTES = 64 << 20
_BLOCK_BYTES = 256 << 10  # about 4,000 molecules, half a second of RDKit


def canonical_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES of RDKit, or None if RDKit cannot parse the molecule."""
    molecule = parse_smiles(smiles.strip())
    return write_canonical(molecule) if molecule else None


def unmapped_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES without atom map numbers, or None if RDKit cannot parse the molecule."""
    molecule = Chem.MolFromSmiles(smiles.strip()) if len(smiles) <= MAX_PARSED else None
    if not molecule:
        return None
    for atom in molecule.GetAtoms():
        atom.SetAtomMapNum(0)
    # parse again: without map numbers, some atoms are no longer stereo centres and explicit hydrogens are removed
    return canonical_smiles(Chem.MolToSmiles(molecule))


def find_tranches(source: str, raw: Path) -> list[tuple[Path, str]] | None:
    """Return path and source of each file, which may have to be downloaded; None if this applies to the list of them.

    A source is a directory, searched recursively for the files of _SUFFIXES, each also with `.gz`; a file
    that lists URLs, one per line, which are downloaded to `raw`; or a SMILES file. The latter two may be URLs
    themselves. The files are in the order of the list or sorted by path.

    Raises:
        UserError: if there is no file in a directory, or a list is invalid.
    """
    path = destination(source, raw)
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file())
        files = [file for file in found if file.name.lower().removesuffix(".gz").endswith(_SUFFIXES)]
        if not files:
            raise UserError(
                f"{path} contains no file named {', '.join(f'*{each}' for each in _SUFFIXES)}: check the source"
            )
        return [(file, str(file)) for file in files]
    if not path.is_file():
        return None
    url_of_path: dict[Path, str] = {}
    for url in _read_url_list(path):
        if url_of_path.setdefault(destination(url, download_directory(url, raw)), url) != url:
            raise UserError(
                f"two URLs {redact_url(url)} differ only in their query: download them under different names"
            )
    return [*url_of_path.items()] or [(path, source)]


def fetch_tranches(source: str, raw: Path) -> list[tuple[Path, str]]:
    """Download the files of `find_tranches`, even if some fail, so that the next start finds the others.

    Raises:
        UserError: as `find_tranches`; if the source does not exist, or a download fails.
    """
    path = fetch(source, raw)
    found = find_tranches(source, raw) or []
    urls = {url: file.parent for file, url in found if is_url(url) and file != path}
    failures: list[UserError] = []

    def download(url: str) -> None:
        try:
            if len(failures) < _MAX_FAILURES:
                fetch(url, urls[url])
        except UserError as error:
            failures.append(error)

    if urls:
        log.info("%s files to download to %s", f"{len(urls):,}", raw)
    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as executor:
        list(executor.map(download, urls))
    if failures:
        more = f"; {len(failures):,} of {len(urls):,} files failed, the others are kept" if len(urls) > 1 else ""
        raise UserError(f"{failures[0]}{more}")
    return found


def _read_url_list(path: Path) -> list[str]:
    """Return the distinct URLs of a list; an empty list if the file is not a list of URLs."""
    is_small = not is_gzipped(path) and path.stat().st_size <= _MAX_LIST_BYTES
    text = path.read_text(errors="replace") if is_small else ""
    if "://" not in text.lstrip().partition("\n")[0]:
        return []
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, line in lines:
        if "://" not in line or len(line.split()) > 1:
            raise UserError(f"{path}:{number}: {redact_text(line)[:60]!r} is not a URL: write one per line")
    return list(dict.fromkeys(line for _, line in lines))


class SmilesBlock(NamedTuple):
    """Consecutive lines of a SMILES file."""

    file: int  # index of the file
    columns: SmilesFormat
    lines: LineBlock

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Yield line number, SMILES and id of every record; an id that is missing is made of those of file and line.

        Raises:
            UserError: if the text is not UTF-8, or a line has no SMILES or, in a table with ids, no id.
        """
        display_path, first_line, data, _ = self.lines
        try:
            lines = data.decode("utf-8-sig" if first_line == 1 else "utf-8").split("\n")
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise UserError(f"{display_path}:{line}: text that is not UTF-8: convert the file with iconv") from error
        if b"\r" in data and b"\r" in data.replace(b"\r\n", b"").rstrip(b"\r"):
            raise UserError(f"{display_path}:{first_line}: {CARRIAGE_RETURN}")
        for line, text in enumerate(lines, first_line):
            if line <= self.columns.skipped:
                continue
            try:
                record = self.columns.split(text)
            except ValueError as error:
                raise UserError(f"{display_path}:{line}: {error}") from error
            if record is None:
                continue
            if self.columns.name is not None and not record[1]:
                raise UserError(f"{display_path}:{line}: a molecule without an id: add one, or remove the line")
            yield line, record[0], record[1] or f"{self.file}-{line}"


def read_smiles(
    files: Iterable[tuple[Path, str]], smiles: Column = None, name: Column = None
) -> Iterator[SmilesBlock]:
    """Read SMILES files, plain or gzipped; for the columns see `smiles_format`.

    `files` are the path of each file, and its path or URL for messages.

    Raises:
        UserError: if a file cannot be read, or no column has SMILES.
    """
    notified: list[Sequence[str]] = []
    for index, (path, display_path) in enumerate(files):
        columns = find_format(read_head(path, HEAD_BYTES), display_path, "sequence_column", smiles, name)
        titles = columns.titles or [f"column {number + 1}" for number in range(columns.columns)]
        if titles not in notified and not columns.has_rest:  # once for all files with these columns
            used = [titles[each] for each in (columns.name, columns.smiles) if each is not None]
            notify_dropped_columns(display_path, titles, used)
            notified.append(titles)
        for block in read_line_blocks(path, display_path, _BLOCK_BYTES):
            yield SmilesBlock(index, columns, block)
