# SPDX-License-Identifier: Apache-2.0
"""Ids equal those of MegaMolBART; text is never parsed as a special token, and no character is lost."""

import hashlib
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bionemo.tokenizers
from bionemo.tokenizers import SmilesTokenizer, Vocabulary, load_tokenizer
from tests.support.molecules import MOLECULES

TOKENIZER = load_tokenizer("megamolbart")
# MegaMolBART's expression; it omits single characters that it does not list
PATTERN = re.compile(
    r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9]"
)
TEXTS = st.lists(
    st.sampled_from(["C", "c", "Br", "Cl", "B", "r", "l", "[nH]", "[C@@H]", "[Xx]", "[", "]", "%10", "%13", "%", "1",
                     "(", ")", "=", "\\", "/", "?", "^", "&", "<MASK>", "<PAD>", "<SEP>", " ", "\n", "\r", "é", "\x80",
                     "\u0190", "😀", "LogD_change_(0.1, 0.3]", "\0"]),
    max_size=30,
).map("".join)  # fmt: skip


def reference(text: str) -> list[int]:
    """Return ids by looking up every match of MegaMolBART's expression in the list of tokens."""
    numbers = {token: i for i, token in enumerate(TOKENIZER.tokens)}
    for special in ("<PAD>", "?", "^", "&", "<MASK>", "<SEP>"):
        del numbers[special]
    ids, at = [], 0
    while at < len(text):
        match = PATTERN.match(text, at)
        piece = match[0] if match and not re.search("^\\[.*[\r\n]", match[0], re.DOTALL) else text[at]
        ids.append(numbers.get(piece, 1))
        at += len(piece)
    return ids


def test_the_vocabulary_is_megamolbarts() -> None:
    path = Path(bionemo.tokenizers.__file__).parent / "vocab" / "megamolbart.txt"
    assert hashlib.md5(path.read_bytes()).hexdigest() == "600888bfc7f9386f47aa148443e68f52"
    assert isinstance(TOKENIZER, SmilesTokenizer)
    assert isinstance(TOKENIZER, Vocabulary)
    assert TOKENIZER.vocab_size == len(set(TOKENIZER.tokens)) == 523
    assert TOKENIZER.padded_vocab_size(128) == 640
    ids = (TOKENIZER.pad_id, TOKENIZER.unk_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert load_tokenizer("megamolbart") is TOKENIZER


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("C", [272]),
        ("c", [273]),
        ("CCc1cc(N)c(N)cc1Cl", [272, 272, 273, 274, 273, 273, 275, 279, 281, 273, 275, 279, 281, 273, 273, 274, 304]),
        ("C[C@H](O)[N+](=O)[O-]", [272, 287, 275, 285, 281, 309, 275, 280, 285, 281, 305]),
        ("CC[C@](C)(Nc1cnnn1C)C1CC1", [272, 272, 291, 275, 272, 281, 275, 279, 273, 274, 273, 282, 282, 282, 274, 272,
                                       281, 272, 274, 272, 272, 274]),
        ("FC(F)(F)/S=N\\I.BrB", [303, 272, 275, 303, 281, 275, 303, 281, 288, 301, 280, 279, 289, 302, 299, 283, 317]),
        ("C%10C%13", [272, TOKENIZER.tokens.index("%10"), 272, 1]),
    ],
)  # fmt: skip
def test_ids_are_those_of_megamolbart(text: str, ids: list[int]) -> None:
    found = TOKENIZER.encode(text)
    assert found.dtype == np.uint16
    assert found.tolist() == ids


@settings(max_examples=300)
@given(TEXTS)
@example("[" * 40 + "C]")
@example("[C\nC]")
def test_tokens_equal_matches_of_megamolbarts_expression(text: str) -> None:
    assert TOKENIZER.encode(text).tolist() == reference(text)
    assert "".join(TOKENIZER.split(text)) == text
    assert len(TOKENIZER.find_unknown(text)) == reference(text).count(1)


@settings(max_examples=100)
@given(st.lists(TEXTS, max_size=8))
def test_encode_all_agrees_with_encode(texts: list[str]) -> None:
    ids, lengths = TOKENIZER.encode_all(texts)
    assert (ids.dtype, lengths.dtype) == (np.uint16, np.int64)
    assert lengths.tolist() == [len(reference(text)) for text in texts]
    assert ids.tolist() == [i for text in texts for i in reference(text)]


def test_text_of_special_tokens_is_unknown() -> None:
    specials = {TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.mask_id, 5}
    for text in ("<PAD>", "^", "&", "<MASK>", "<SEP>", "?", "<UNUSED_0>", "Solubility_no_change", "\x80\x82\x83\x84"):
        assert not specials & set(TOKENIZER.encode(text).tolist()), text
        assert TOKENIZER.find_unknown(text), text


def test_decode_inverts_encode() -> None:
    for text in MOLECULES:
        assert not TOKENIZER.find_unknown(text) or "?" in TOKENIZER.decode(TOKENIZER.encode(text))
        if not TOKENIZER.find_unknown(text):
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(np.array([2, 272, 4, 273, 3, 0])) == "^C<MASK>c&<PAD>"
    with pytest.raises(IndexError):
        TOKENIZER.decode(np.array([523]))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([2, 272, 273, 3, 0, 0], "Cc"),
        ([272, 273], "Cc"),
        ([2, 3], ""),
        ([], ""),
        ([272, 3, 272, 3], "C"),
        ([0, 2, 272], "C"),
    ],
)
def test_output_ends_at_the_first_end_token(ids: list[int], text: str) -> None:
    assert TOKENIZER.decode_output(np.array(ids, np.int64)) == text


def test_find_unknown() -> None:
    assert TOKENIZER.find_unknown("C[Xx]C^[Xx]%99 ") == ["[Xx]", "^", "[Xx]", "%99", " "]
    assert TOKENIZER.find_unknown("CC[nH]") == []


def test_opening_brackets_take_linear_time() -> None:
    start = time.process_time()
    assert len(TOKENIZER.encode("[" * 200_000)) == 200_000
    assert time.process_time() - start < 5
