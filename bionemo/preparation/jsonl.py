# SPDX-License-Identifier: Apache-2.0
"""Tokenizes the documents of JSON Lines files."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.preparation.blocks import BYTE_ORDER_MARK, LineBlock
from bionemo.tokenizers.gpt2 import read_gpt2

Policy = Literal["error", "skip"]


class TokenizedDocuments(NamedTuple):
    """Result of tokenizing a block of lines."""

    ids: NDArray[np.integer[Any]]  # [n] concatenated tokens of the documents that are kept
    lengths: list[int]  # number of tokens of each
    read: int  # number of documents
    dropped: Counter[str]  # number of dropped documents by reason
    size: int  # `LineBlock.size`


@dataclass(frozen=True)
class DocumentTokenizer:
    """Tokenizes documents with GPT-2's tokenizer."""

    vocab_file: str | None
    merge_file: str | None
    json_key: str  # key of the text in the JSON object of a line
    append_eod: bool  # append the end-of-document token to each document
    on_empty: Policy  # policy for texts without tokens
    on_invalid: Policy  # policy for lines that are not a JSON object with a text

    def tokenize(self, lines: LineBlock) -> TokenizedDocuments:
        """Tokenize the documents of a block of lines; skip blank lines.

        Raises:
            UserError: if a policy is "error" and rejects a document.
        """
        tokenizer = read_gpt2(self.vocab_file, self.merge_file)
        dropped: Counter[str] = Counter()
        texts, numbers = [], []
        read = 0
        for number, line in _numbered(lines):
            read += 1
            text, problem = _parse(line, self.json_key)
            if not problem:
                texts.append(text)
                numbers.append(number)
            elif self.on_invalid == "skip":
                dropped["invalid"] += 1
            else:
                raise UserError(f"{lines.display_path}:{number}: {problem}: correct it, or set on_invalid=skip")
        end = np.array([tokenizer.eod_id] if self.append_eod else [], tokenizer.dtype)
        kept = []
        for number, ids in zip(numbers, tokenizer.encode_all(texts), strict=True):
            if len(ids):
                kept.append(np.append(ids, end))
            elif self.on_empty == "skip":
                dropped["empty"] += 1
            else:
                raise UserError(
                    f"{lines.display_path}:{number}: a document without text: remove it, or set on_empty=skip"
                )
        return TokenizedDocuments(np.concatenate([end[:0], *kept]), list(map(len, kept)), read, dropped, lines.size)


def _numbered(lines: LineBlock) -> Iterator[tuple[int, bytes]]:
    data = lines.data.removeprefix(BYTE_ORDER_MARK) if lines.first_line == 1 else lines.data
    for number, line in enumerate(data.split(b"\n"), lines.first_line):
        if line.strip():
            yield number, line


def _parse(line: bytes, key: str) -> tuple[str, str]:
    """Return the text of a line and an error message, one of which is empty."""
    try:
        content = json.loads(line.decode())
        if not isinstance(content, dict):
            return "", "a line that is not a JSON object"
        if key not in content:
            return "", f"no key {key!r}"
        if not isinstance(content[key], str):
            return "", f"the {key!r} is not a string"
        content[key].encode()
    except UnicodeDecodeError:
        return "", "text that is not UTF-8"
    except UnicodeEncodeError:
        return "", f"the {key!r} contains an unpaired surrogate"
    except (ValueError, RecursionError):
        return "", "a line that is not JSON"
    return content[key], ""
