# SPDX-License-Identifier: Apache-2.0
"""The SMILES files of a preparation: the files of a directory, the URLs of a list, or a single file."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text
from bionemo.data.files import SMILES_EXTENSIONS
from bionemo.preparation.download import fetch
from bionemo.preparation.inputs import is_gzipped
from bionemo.preparation.urls import absolute_source, destination, download_directory, redact_url

log = logging.getLogger(__name__)
_SUFFIXES = (".txt", ".csv", ".tsv", *SMILES_EXTENSIONS)
_PARALLEL_DOWNLOADS = 8  # tranches are small, so latency dominates
_MAX_FAILURES = 24  # after which the remaining downloads are cancelled: the server or the network is down
_MAX_LIST_BYTES = 64 << 20


def fetch_tranches(source: str, raw: Path) -> list[tuple[Path, str]]:
    """Find the files of a source, and download those of a list.

    A source is a directory, searched recursively for the files of _SUFFIXES, each also with `.gz`; a file
    that lists URLs, one per line, which are downloaded to `raw`; or a SMILES file. The latter two may be URLs
    themselves. Returns the path of each file and its path or URL for messages, in the order of the list or sorted by
    path.

    Raises:
        UserError: if there is no file, or a download fails.
    """
    path = fetch(source, raw)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.name.lower().removesuffix(".gz").endswith(_SUFFIXES)]
        files = [file for file in files if file.is_file()]
        if not files:
            raise UserError(
                f"{path} contains no file named {', '.join(f'*{each}' for each in _SUFFIXES)}: check the source"
            )
        return [(file, str(file)) for file in files]
    urls = _read_url_list(path)
    return _download(urls, raw) if urls else [(path, redact_url(source))]


def known_tranches(source: str, raw: Path) -> list[str] | None:
    """Return the files or URLs of `fetch_tranches` without a download, or None if a download is necessary.

    Errors as in `fetch_tranches`, for an invalid list.
    """
    path = destination(source, raw)
    if path.is_dir():
        return [str(file) for file, _ in fetch_tranches(source, raw)]
    if not path.is_file():
        return None
    return [redact_url(url) for url in _read_url_list(path)] or [absolute_source(source)]


def _read_url_list(path: Path) -> list[str]:
    """Return the distinct URLs of a list; an empty list if the file is not a list of URLs."""
    if is_gzipped(path) or path.stat().st_size > _MAX_LIST_BYTES:
        return []
    with path.open(errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        if "://" not in first:
            return []
        file.seek(0)
        lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    for number, line in lines:
        if "://" not in line or len(line.split()) > 1:
            raise UserError(f"{path}:{number}: {redact_text(line)[:60]!r} is not a URL: write one per line")
    return list(dict.fromkeys(line for _, line in lines))


def _download(urls: Sequence[str], raw: Path) -> list[tuple[Path, str]]:
    """Download all files even if some fail, so that the next start finds the others."""
    log.info("%s files to download to %s", f"{len(urls):,}", raw)
    url_of_path: dict[Path, str] = {}
    for url in urls:
        other = url_of_path.setdefault(destination(url, download_directory(url, raw)), url)
        if other != url:
            raise UserError(
                f"two URLs {redact_url(url)} differ only in their query: download them under different names"
            )
    paths: list[tuple[Path, str]] = []
    failures: list[UserError] = []
    executor = ThreadPoolExecutor(_PARALLEL_DOWNLOADS)
    try:
        futures = [(url, executor.submit(fetch, url, download_directory(url, raw))) for url in urls]
        for url, future in futures:
            try:
                paths.append((future.result(), redact_url(url)))
            except UserError as error:
                failures.append(error)
                if len(failures) == _MAX_FAILURES:
                    break
    finally:
        executor.shutdown(cancel_futures=True)
    if failures:
        more = f"; {len(failures):,} of {len(urls):,} files failed, the others are kept" if len(urls) > 1 else ""
        raise UserError(f"{failures[0]}{more}")
    return paths
