# SPDX-License-Identifier: Apache-2.0
"""Ids equal those of v1 and of the published ESM-2; packed and single encoding agree."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bionemo.tokenizers
from bionemo.common.errors import UserError
from bionemo.data.letters import LetterCounts
from bionemo.tokenizers import Alphabet, load_tokenizer

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZO" * 2 + ".-*Jjmkt <?é\t\n\xa0"


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", []), ("mkta", [22, 16, 12, 6]), ("MKJ*-A", [22, 16, 0, 6]), ("M K", [22, 0, 16]), ("jk", [0, 16])],
)
def test_esm1nv_ids(text: str, ids: list[int]) -> None:
    assert load_tokenizer("esm1nv").encode(text).tolist() == ids


def test_special_ids() -> None:
    one, two = load_tokenizer("esm1nv"), load_tokenizer("esm2nv")
    assert (one.vocab_size, one.unk_id, one.bos_id, one.eos_id, one.pad_id, one.mask_id) == (30, 0, 1, 2, 3, 4)
    assert (two.vocab_size, two.bos_id, two.pad_id, two.eos_id, two.unk_id, two.mask_id) == (33, 0, 1, 2, 3, 32)
    assert one.residue_ids.tolist() == list(range(5, 30))
    assert two.residue_ids.tolist() == list(range(4, 31))  # not <null_1>
    assert (one.padded_vocab_size(128), two.padded_vocab_size(1), two.padded_vocab_size(11)) == (128, 33, 33)


def test_esm2nv_agrees_with_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.EsmTokenizer(str(Path(bionemo.tokenizers.__file__).parent / "vocab" / "esm2nv.txt"))
    alphabet = load_tokenizer("esm2nv")
    for text in ["MKTA", "MKJ*-A", " J J ", "J.J-J", "M\tKéé A", *random_texts(300, seed=1)]:
        upper = text.upper()  # lower case is unknown to the reference
        assert alphabet.encode(upper).tolist() == reference.encode(upper, add_special_tokens=False), repr(text)
    assert alphabet.encode("").size == 0
    assert [alphabet.bos_id, 20, alphabet.eos_id] == reference.encode("M")


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv", "prott5nv"])
def test_lower_case_letters_are_the_residues_of_upper_case(name: str) -> None:
    alphabet = load_tokenizer(name)
    for text in random_texts(100, seed=3):
        assert alphabet.encode(text.lower()).tolist() == alphabet.encode(text.upper()).tolist(), repr(text)


@pytest.mark.parametrize(
    "text", ["M<mask>K", "<cls>MK<eos>", "MK<pad>", "M<unk>", "<s>M</s>", "M<extra_id_0>K", "M<MASK>"]
)
@pytest.mark.parametrize("name", ["esm1nv", "esm2nv", "prott5nv"])
def test_special_tokens_in_a_text_are_refused(name: str, text: str) -> None:
    with pytest.raises(UserError, match="special tokens are not read from text"):
        load_tokenizer(name).encode(text)
    assert load_tokenizer("esm2nv").encode("M<K").tolist() == [20, 3, 15]


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_packed_encoding_agrees_with_single(name: str) -> None:
    alphabet = load_tokenizer(name)
    texts = ["".join(text.split()) for text in random_texts(200, seed=2)] + ["**", "*", "", "J*", ""]
    letters = [text.encode() for text in texts]
    starts = np.cumsum([0, *map(len, letters)])[:-1]
    ids = alphabet.table[np.frombuffer(b"".join(letters), np.uint8)]
    packed = ids[alphabet.collapse_unknown(ids, starts)]
    assert packed.dtype == np.uint8
    assert packed.tolist() == np.concatenate([alphabet.encode(text) for text in texts]).tolist()


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_decode_inverts_encode(name: str) -> None:
    alphabet = load_tokenizer(name)
    assert alphabet.decode(alphabet.encode("MKTAXBZUO")) == "MKTAXBZUO"
    assert (
        alphabet.decode(np.array([alphabet.bos_id, alphabet.mask_id])) == alphabet.tokens[alphabet.bos_id] + "<mask>"
    )


def test_unknown_name_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"'esm3'.*esm1nv, esm2nv"):
        load_tokenizer("esm3")


def test_tokenizers_are_cached_and_comparable() -> None:
    assert load_tokenizer("esm1nv") is load_tokenizer("esm1nv")
    assert isinstance(hash(load_tokenizer("esm1nv")), int)
    assert load_tokenizer("esm1nv") != load_tokenizer("esm2nv")
    assert isinstance(load_tokenizer("esm1nv"), Alphabet)


def test_import_needs_no_torch() -> None:
    code = "import bionemo.tokenizers, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("tokens", [("s", "J"), ("J", "s")])
def test_a_lower_case_letter_may_be_a_token(tokens: tuple[str, str]) -> None:
    known = load_tokenizer("esm2nv")
    assert isinstance(known, Alphabet)
    alphabet = replace(known, tokens=(*tokens, *known.tokens), unk_id=5)
    assert [alphabet.tokens[number] for number in alphabet.encode("Ssjaw")] == ["S", "s", "J", "A", "W"]
    counts = LetterCounts(alphabet)
    counts.add(["Ssjaw"])
    assert "lower-case letters, read as residues: 3 " in str(counts.note(str))
