# SPDX-License-Identifier: Apache-2.0
"""HTML pages and tables that need no network."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bionemo.common.files import refuse_replacing, write_atomic

_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="bionemo">'
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222;
       overflow-wrap: anywhere }
div { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.texts td { white-space: normal; max-width: 24rem; min-width: 5rem } svg { max-width: 100%; height: auto }
pre { white-space: pre-wrap }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page; the parts are HTML, the title is text."""
    return (
        f'{_START}<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write_page(path: Path, page: str) -> None:
    """Write a page, or replace an earlier one.

    Raises:
        UserError: if the file exists and is not such a page.
        OSError: if it cannot be written.
    """
    refuse_replacing(path, _START.encode(), "--output")
    write_atomic(path, page)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts."""
    cells = [f"<th>{escape(cell)}</th>" for cell in header]
    lines = [cells, *([f"<td>{escape(cell)}</td>" for cell in row] for row in rows)]
    body = "".join("<tr>" + "".join(line) + "</tr>" for line in lines)
    return f"<div><table>{body}</table></div>"


def format_mean(value: Sequence[float | None] | None) -> str:
    """Return a mean and, if it is known, its error; "" if there is none."""
    if not value or value[0] is None:
        return ""
    return " ± ".join(f"{each:.4g}" for each in value if each is not None)
