# SPDX-License-Identifier: Apache-2.0
"""The text of proteins: what is not part of the sequence, and what is refused.

White space is not part of a sequence, nor is the `*` at its end, with which gene callers write the stop codon.
"""

import logging
import re
from functools import cache

from bionemo.common.errors import UserError

_log = logging.getLogger(__name__)
WHITE_SPACE = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"
_SPECIAL_TOKEN = re.compile(rb"<[^<>]*>")


def trim(text: bytes) -> bytes:
    """Return the letters of a protein, without white space and stop codons at its end."""
    return text.translate(None, WHITE_SPACE).rstrip(b"*")


def note_stops(name: str, stops: int, sequences: int) -> None:
    """Log, once in a process, that stop codons at the end of sequences are dropped; `name` is that of the file."""
    _warn_once(
        f"{name}: the '*' at the end of {stops:,} of {sequences:,} sequences is dropped: a stop codon, unknown to the "
        "models"
    )


@cache
def _warn_once(note: str) -> None:
    _log.warning(note)


def check_letters(text: bytes, name: str) -> None:
    """Check that a protein has only ASCII letters and no special token; `name` identifies it in the error.

    Raises:
        UserError: if it contains another letter, or a special token.
    """
    check_special_tokens(text, name)
    if not text.isascii():
        odd = next(each for each in text.decode(errors="replace") if not each.isascii())
        raise UserError(f"{name} contains {odd!r} (U+{ord(odd):04X}): residues must be ASCII letters")


def check_special_tokens(text: bytes, name: str) -> None:
    """Raise a UserError if a protein contains a special token such as `<mask>`, whose letters would be residues."""
    if token := _SPECIAL_TOKEN.search(text):
        raise UserError(
            f"{name} contains {token[0].decode(errors='replace')[:20]!r}: special tokens are not read from text; "
            "write X for an unknown residue, or mask token ids in Python (vocabulary.mask_id)"
        )
