# SPDX-License-Identifier: Apache-2.0
"""GPT-2's tokenizer agrees with transformers; invalid files are reported in one line."""

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.common.errors import UserError
from bionemo.tokenizers.gpt2 import GPT2Tokenizer, id_dtype, placeholder_tokenizer, read_gpt2
from tests.support.bpe import TEXTS, write_bpe

Files = tuple[Path, Path]
PIECES = st.sampled_from(
    [*"abeT019'!.,-\n\t\r \u00a0\u2028é蛋🧬\x00", "'s", "'ll", "  ", "the", "protein", " protein"]
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def ours(files: Files) -> GPT2Tokenizer:
    return read_gpt2(*files)


@pytest.fixture(scope="module")
def theirs(files: Files) -> Callable[[str], list[int]]:
    from transformers import GPT2TokenizerFast

    reference = GPT2TokenizerFast(vocab=str(files[0]), merges=str(files[1]))
    return lambda text: reference(text)["input_ids"]


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=30).map("".join)))
def test_agrees_with_transformers(ours: GPT2Tokenizer, theirs: Callable[[str], list[int]], text: str) -> None:
    ids = ours.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == theirs(text)
    assert ours.decode(ids) == text


def test_encode_all_agrees_with_encode(ours: GPT2Tokenizer) -> None:
    found = ours.encode_all([*TEXTS, ""])
    assert [ids.tolist() for ids in found] == [ours.encode(text).tolist() for text in [*TEXTS, ""]]
    assert len(found[0]) < len(TEXTS[0]) / 2  # merges were used
    assert not len(found[-1])


def test_special_token_in_a_document_is_text(ours: GPT2Tokenizer) -> None:
    for text in ("<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> <|endoftext|>"):
        assert ours.eod_id not in ours.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.eod_id == ours.vocab_size - 1
    assert ours.decode([ours.eod_id]) == ours.tokens[ours.eod_id] == "<|endoftext|>"


def test_sizes_identity_and_pickle(ours: GPT2Tokenizer, files: Files, tmp_path: Path) -> None:
    assert ours.vocab_size == len(json.loads(files[0].read_text())) == len(ours.tokens)
    assert ours.padded_vocab_size(100) == 400
    assert (id_dtype(50257), id_dtype(65536), id_dtype(65537)) == (np.uint16, np.uint16, np.int32)
    again = pickle.loads(pickle.dumps(ours))
    assert again.identity == ours.identity
    assert again.encode(TEXTS[1]).tolist() == ours.encode(TEXTS[1]).tolist()
    assert read_gpt2(*write_bpe(tmp_path, TEXTS[:1])).identity != ours.identity
    with pytest.raises(IndexError):
        ours.decode([ours.vocab_size])


def test_merges_in_another_order_are_another_vocabulary(ours: GPT2Tokenizer, files: Files, tmp_path: Path) -> None:
    first, *merges = files[1].read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join([first, *merges[1::-1], *merges[2:]]))
    assert read_gpt2(files[0], tmp_path / "merges.txt").identity != ours.identity


def test_without_files(tmp_path: Path) -> None:
    stand_in = placeholder_tokenizer(50257)
    assert (stand_in.vocab_size, stand_in.eod_id, stand_in.padded_vocab_size(128)) == (50257, 50256, 50304)
    assert stand_in.dtype is np.uint16
    for call in (lambda: stand_in.encode("a"), lambda: stand_in.encode_all([]), lambda: stand_in.decode([1])):
        with pytest.raises(UserError, match=r"model\.tokenizer\.vocab_file and model\.tokenizer\.merge_file"):
            call()


def vocab_of(change: Callable[[dict[str, int]], object]) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        vocab = json.loads(files[0].read_text())
        change(vocab)
        files[0].write_text(json.dumps(vocab))

    return apply


def merges_of(change: Callable[[list[str]], object]) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        lines = files[1].read_text().splitlines()
        change(lines)
        files[1].write_text("\n".join(lines))

    return apply


WRONG: list[tuple[Callable[[Files], object], str]] = [
    (lambda files: files[0].unlink(), "vocab.json .*No such file"),
    (lambda files: files[1].unlink(), "merges.txt .*No such file"),
    (lambda files: files[0].write_text('{"a": 0'), "EOF while parsing"),
    (lambda files: files[0].write_text("{}"), "no token '!'"),
    (lambda files: files[0].write_text(files[1].read_text()), "expected value at line 1"),  # the two files exchanged
    (lambda files: files[1].write_text(files[0].read_text()), "Merges text file invalid at line 1"),
    (vocab_of(lambda vocab: vocab.pop("<|endoftext|>")), r"no token '<\|endoftext\|>'"),
    (vocab_of(lambda vocab: vocab.update({"<|endoftext|>": 9999})), "ids of the tokens are not 0, 1, 2"),
    (vocab_of(lambda vocab: vocab.update({"<pad>": 7})), "ids of the tokens are not 0, 1, 2"),
    (vocab_of(lambda vocab: vocab.update({"<pad>": vocab.pop("a")})), "no token 'a'"),
    (vocab_of(lambda vocab: vocab.update({"qqq": len(vocab)})), "no merge creates 1 tokens, such as 'qqq'"),
    (merges_of(lambda lines: lines.insert(3, "q q")), "Token `qq` out of vocabulary"),
    (merges_of(lambda lines: lines.insert(3, "a b c")), "Merges text file invalid at line 3"),
    (merges_of(lambda lines: lines.__delitem__(slice(9, None))), "no merge creates"),
    (merges_of(lambda lines: lines.clear()), "no merge creates"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG, ids=range(len(WRONG)))
def test_invalid_files(damage: Callable[[Files], object], message: str, files: Files, tmp_path: Path) -> None:
    copies = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    damage(copies)
    with pytest.raises(UserError, match=message) as caught:
        read_gpt2(*copies)
    assert "\n" not in str(caught.value)


def test_one_missing_file(files: Files) -> None:
    for pair, message in (
        ((files[0], None), "merge_file, but only vocab_file="),
        ((None, files[1]), "needs vocab_file, b"),
    ):
        with pytest.raises(UserError, match=message):
            read_gpt2(*pair)
    with pytest.raises(UserError, match="give both"):
        read_gpt2(None, None)


def test_more_special_tokens_windows_line_ends_and_no_version_line(files: Files, tmp_path: Path) -> None:
    vocab = json.loads(files[0].read_text())
    for special in ("<pad>", "[SEP]"):
        vocab[special] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_bytes(b"\r\n".join(files[1].read_bytes().split(b"\n")[1:]))
    found = read_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert found.encode(TEXTS[0]).tolist() == read_gpt2(*files).encode(TEXTS[0]).tolist()


@settings(max_examples=60)
@given(st.integers(0, 1), st.integers(0, 10**6), st.binary(max_size=6), st.booleans())
def test_random_bytes(files: Files, which: int, position: int, junk: bytes, cut: bool) -> None:
    """The files are a valid vocabulary, or a UserError is raised."""
    directory = files[0].parent / "hostile"
    directory.mkdir(exist_ok=True)
    copies = directory / "vocab.json", directory / "merges.txt"
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    data = copies[which].read_bytes()
    position %= len(data)
    copies[which].write_bytes(data[:position] + junk + (b"" if cut else data[position + len(junk) :]))
    read_gpt2.cache_clear()
    with suppress(UserError):
        read_gpt2(*copies).encode("the protein")
