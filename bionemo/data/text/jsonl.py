# SPDX-License-Identifier: Apache-2.0
"""Documents of JSON Lines files, some lines at a time, to the ids of their texts."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.dataset import Sequences, end_to_end
from bionemo.data.shards.blocks import BYTE_ORDER_MARK
from bionemo.tokenizers.gpt2 import read_gpt2

Strictness = Literal["error", "skip"]


class Lines(NamedTuple):
    """Some whole lines of a file.

    Attributes:
        shown: what the user calls the file.
        first: number of the first line, from 1.
        data: the lines.
        size: bytes of the file, as it lies on the disk, that are done with these.
    """

    shown: str
    first: int
    data: bytes
    size: int


class Documents(NamedTuple):
    """What became of some lines.

    Attributes:
        tokens: documents that are kept.
        read: how many there were.
        dropped: how many were left out, by reason.
        size: of the lines.
    """

    tokens: Sequences
    read: int
    dropped: Counter[str]
    size: int


@dataclass(frozen=True)
class TextRules:
    """How documents become tokens.

    Attributes:
        vocab_file: of GPT-2's tokenizer.
        merge_file: of the same.
        json_key: where in the object of a line its text is.
        append_eod: end each document with the end token.
        on_empty: a text without tokens.
        on_invalid: a line that is no JSON object with a text.
    """

    vocab_file: str | None
    merge_file: str | None
    json_key: str
    append_eod: bool
    on_empty: Strictness
    on_invalid: Strictness

    def tokenise(self, lines: Lines) -> Documents:
        """Tokenise the documents of some lines; blank lines are none.

        Raises:
            UserError: at a document that a policy calls an error.
        """
        tokenizer = read_gpt2(self.vocab_file, self.merge_file)
        dropped: Counter[str] = Counter()
        texts, numbers = [], []
        read = 0
        for number, line in _numbered(lines):
            read += 1
            text, problem = _text(line, self.json_key)
            if not problem:
                texts.append(text)
                numbers.append(number)
            elif self.on_invalid == "skip":
                dropped["invalid"] += 1
            else:
                raise UserError(f"{lines.shown}:{number}: {problem}: correct it, or set on_invalid=skip")
        end = np.array([tokenizer.eod_id] if self.append_eod else [], tokenizer.dtype)
        kept = []
        for number, ids in zip(numbers, tokenizer.encode_all(texts), strict=True):
            if len(ids):
                kept.append(np.append(ids, end))
            elif self.on_empty == "skip":
                dropped["empty"] += 1
            else:
                raise UserError(f"{lines.shown}:{number}: a document without text: remove it, or set on_empty=skip")
        return Documents(end_to_end(kept, tokenizer.dtype), read, dropped, lines.size)


def _numbered(lines: Lines) -> Iterator[tuple[int, bytes]]:
    data = lines.data
    if lines.first == 1 and data.startswith(BYTE_ORDER_MARK):
        data = data[len(BYTE_ORDER_MARK) :]
    for number, line in enumerate(data.split(b"\n"), lines.first):
        if line.strip():
            yield number, line


def _text(line: bytes, key: str) -> tuple[str, str]:
    """The text of a line, and what is wrong with it, "" if nothing is."""
    try:
        content = json.loads(line.decode())
    except UnicodeDecodeError:
        return "", "text that is not UTF-8"
    except (ValueError, RecursionError):
        return "", "a line that is not JSON"
    if not isinstance(content, dict):
        return "", "a line that is not a JSON object"
    if key not in content:
        return "", f"no key {key!r}"
    text = content[key]
    if not isinstance(text, str):
        return "", f"the {key!r} is not a string"
    if text.isascii():
        return text, ""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f"the {key!r} has half a surrogate pair"
    return text, ""
