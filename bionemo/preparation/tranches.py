# SPDX-License-Identifier: Apache-2.0
"""Where the SMILES files of a preparation are: in a directory, at the URLs of a list, or there is just one."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text
from bionemo.preparation.addresses import described, place, public
from bionemo.preparation.download import fetch
from bionemo.preparation.inputs import is_gzipped

log = logging.getLogger(__name__)
_SUFFIXES = (".txt", ".smi", ".csv", ".tsv")
_AT_ONCE = 8  # downloads: a tranche is small, and most of its time is waiting for an answer
_HOPELESS = 24  # failures after which the others are not tried: the server or the network is gone
_LONGEST_LIST = 64 << 20  # bytes


def tranches(source: str, raw: Path) -> list[tuple[Path, str]]:
    """Find the files of a source, and download those of a list.

    Args:
        source: a directory, searched in depth for `.txt`, `.smi`, `.csv` and `.tsv`, each also `.gz`; a file that
            lists URLs, one per line; or a SMILES file. The latter two may be URLs themselves.
        raw: directory for downloads.

    Returns:
        Path of each, and what the user calls it, in the order of the list, or sorted by path.

    Raises:
        UserError: when there is none, or one cannot be downloaded.
    """
    path = fetch(source, raw)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _is_smiles(file))
        if not files:
            raise UserError(
                f"{path} holds no file named {', '.join(f'*{each}' for each in _SUFFIXES)}: check the source"
            )
        return [(file, str(file)) for file in files]
    urls = _listed(path)
    return _download(urls, raw) if urls else [(path, public(source))]


def known(source: str, raw: Path) -> list[str] | None:
    """Say which files or URLs `tranches` gives, without a download; None where only a download tells.

    Raises:
        UserError: as `tranches`, for a list that is invalid.
    """
    path = place(source, raw)
    if path.is_dir():
        return [str(file) for file, _ in tranches(source, raw)]
    if not path.is_file():
        return None
    return [public(url) for url in _listed(path)] or [described(source)]


def _is_smiles(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(_SUFFIXES)


def _listed(path: Path) -> list[str]:
    """URLs of a list, each once; none for a file that is no list."""
    if is_gzipped(path) or path.stat().st_size > _LONGEST_LIST:
        return []
    with path.open(errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        if "://" not in first:
            return []
        file.seek(0)
        lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    for number, line in lines:
        if "://" not in line or len(line.split()) > 1:
            raise UserError(f"{path}:{number}: {redact_text(line)[:60]!r} is no URL: write one per line")
    return list(dict.fromkeys(line for _, line in lines))


def _download(urls: Sequence[str], raw: Path) -> list[tuple[Path, str]]:
    """Try all of them, so that a start after a failure finds all the others there."""
    log.info("%s files to download to %s", f"{len(urls):,}", raw)
    targets: dict[Path, str] = {}
    for url in urls:
        other = targets.setdefault(place(url, _place(url, raw)), url)
        if other != url:
            raise UserError(f"two URLs {public(url)} differ in their query alone: download them under different names")
    paths: list[tuple[Path, str]] = []
    failed: list[UserError] = []
    executor = ThreadPoolExecutor(_AT_ONCE)
    try:
        for url, future in [(url, executor.submit(fetch, url, _place(url, raw))) for url in urls]:
            try:
                paths.append((future.result(), public(url)))
            except UserError as error:
                failed.append(error)
                if len(failed) == _HOPELESS:
                    break
    finally:
        executor.shutdown(cancel_futures=True)
    if failed:
        more = f"; so failed {len(failed):,} of {len(urls):,} files, those that are there are kept" if urls[1:] else ""
        raise UserError(f"{failed[0]}{more}")
    return paths


def _place(url: str, raw: Path) -> Path:
    """Directory for a download: as on the server, for the same name may stand in several directories."""
    parts = urlsplit(url)
    return raw.joinpath(parts.hostname or "", *(part for part in parts.path.split("/")[:-1] if part.strip(".")))
