# SPDX-License-Identifier: Apache-2.0
"""The same protein in other spellings gives the same outputs; letters that the model does not know are counted."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bionemo
from bionemo.common.errors import UserError
from bionemo.data.letters import LetterCounts
from bionemo.tokenizers import load_tokenizer
from tests.inference.samples import RESIDUES, go, same, sequences

SPELLINGS = {
    "lower case": str.lower,
    "soft-masked": lambda text: text[: len(text) // 2].lower() + text[len(text) // 2 :],
    "stop codon": lambda text: f"{text}*",
    "stop codons": lambda text: f"{text} **",
    "spaces": " ".join,
    "tabs and spaces": lambda text: "\t".join(text[:9]) + "  " + text[9:] + " ",
}
OUTPUTS = "model.downstream_task.outputs=[embeddings,hiddens]"


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".fasta":
        lines = [f">p{n} text\n{text[:30]}\n{text[30:]}\n".replace("\n\n", "\n") for n, text in enumerate(texts)]
        path.write_text("".join(lines))
    else:
        path.write_text("id,sequence\n" + "".join(f'p{n},"{text}"\n' for n, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("kind", ["fasta", "csv"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_a_protein_give_the_same_outputs(
    spelling: str, kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = sequences((10, 1, 57, 90, 94))  # 94 is the maximum length
    policy = "model.data.long_sequences=error"
    go(model, write(tmp_path / f"x.{kind}", texts), tmp_path / "one.npz", OUTPUTS, policy)
    assert capsys.readouterr().err == ""
    spelled = write(tmp_path / f"y.{kind}", [SPELLINGS[spelling](text) for text in texts])
    go(model, spelled, tmp_path / "two.npz", OUTPUTS, policy)
    assert same(tmp_path / "one.npz", tmp_path / "two.npz")
    notes = capsys.readouterr().err.splitlines()
    expected = {
        "lower": "lower-case letters, read as residues: ",
        "soft-": "lower-case letters",
        "stop ": "'*' at the",
    }
    assert [expected.get(spelling[:5], "") in note for note in notes] == [True] * (not spelling.endswith("spaces"))


@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_counts_equal_those_of_a_loop(name: str) -> None:
    generator, alphabet = random.Random(4), load_tokenizer(name)
    texts = [
        "".join(generator.choices(RESIDUES + "XBZ" * 3 + "j:*-.7a", k=generator.randrange(1, 60))) for _ in range(99)
    ]
    counts = LetterCounts(alphabet)
    for first in range(0, 99, 10):
        counts.add([" ".join(text) for text in texts[first : first + 10]])
    known = {each for each in alphabet.tokens if len(each) == 1}
    unknown = Counter(letter for text in texts for letter in text.rstrip("*") if letter.upper() not in known)
    affected = [n for n, text in enumerate(texts) if set(text.rstrip("*")) & unknown.keys()]
    note = counts.note(lambda number: f"sequence {number}") or ""
    assert counts.unknown == unknown
    assert f"(in {len(affected)} of 99 sequences, the first sequence {affected[0]})" in note.split(";")[0]
    assert all(f"{letter!r} {count}" in note for letter, count in unknown.items())
    assert f"lower-case letters, read as residues: {sum(text.rstrip('*').count('a') for text in texts)} " in note
    assert f"dropped: {sum(text.endswith('*') for text in texts)} (" in note
    assert ("gaps" in note) == (name == "esm2nv")


def test_unknown_letters_are_counted_in_the_whole_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*["MKV"] * 400, "MK:VJ", "M:K"]
    for kind in ("fasta", "csv"):
        go(model, write(tmp_path / f"x.{kind}", texts), tmp_path / f"{kind}.npz", OUTPUTS)
        (note,) = capsys.readouterr().err.splitlines()
        assert note == (
            f"note: {tmp_path}/x.{kind}: letters unknown to the model, each read as an unknown residue: ':' 2, 'J' 1 "
            "(in 2 of 402 sequences, the first p400)"
        )
    assert np.load(tmp_path / "csv.npz")["tokens"].tolist() == [3] * 400 + [5, 3]


def test_unknown_tokens_of_molecules_are_counted_in_the_whole_file(
    writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.smi").write_text("CCO a\n" * 300 + "C[Hg]C b\nCC[Xx] c\nC[Hg]O d\n")
    go(writer, tmp_path / "x.smi", tmp_path / "x.npz")
    note = capsys.readouterr().err
    assert "tokens unknown to the model, all read alike, so that compounds become equal: '[Hg]' 2, '[Xx]' 1" in note
    assert "(in 3 of 303 sequences, the first b)" in note


@pytest.mark.parametrize("token", ["<mask>", "<cls>", "<eos>", "<unk>", "<pad>", "<MASK>"])
def test_special_tokens_in_a_text_are_refused(token: str, model: Path, tmp_path: Path) -> None:
    message = f"contains '{token}': special tokens are not read from text; write X for an unknown residue"
    texts = [*sequences(), f"MKV{token}LL"]
    for kind in ("csv", "fasta"):
        path = write(tmp_path / f"x.{kind}", texts)
        line = next(line for line, text in enumerate(path.read_text().split("\n"), 1) if token in text)
        with pytest.raises(UserError, match=rf"x\.{kind}:{line} {message}"):
            go(model, path, tmp_path / "x.npz")
    with pytest.raises(UserError, match=f"sequence 1 {message}"):
        bionemo.load(model, "cpu").embed(["MKV", f"M{token}"])


@pytest.mark.parametrize("letter", ["é", "\u200b", "Ｍ", "\ufeff"])
def test_letters_beyond_ascii_are_refused(letter: str, model: Path, tmp_path: Path) -> None:
    message = re.escape(f"contains {letter!r} (U+{ord(letter):04X}): residues must be ASCII letters")
    with pytest.raises(UserError, match=f"x.csv:3 {message}"):
        go(model, write(tmp_path / "x.csv", ["MKV", f"MK{letter}L"]), tmp_path / "x.npz")
    with pytest.raises(UserError, match=f"sequence 0 {message}"):
        bionemo.load(model, "cpu").embed([f"MK{letter}L"])


def test_the_python_interface_notes_letters_and_reads_masked_ids(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = bionemo.load(model, "cpu")
    assert np.array_equal(ours.embed(["MKV", "mk v*"])[0], ours.embed(["MKV", "mk v*"])[1])
    assert caplog.messages[0].startswith(
        "lower-case letters, read as residues: 3 (in 1 of 2 sequences, the first sequence 1)"
    )
    assert len(caplog.messages) == 2
    caplog.clear()
    (ids,) = ours.ids(["MKTAYIAKQR"])
    masked = ids.copy()
    masked[3] = ours.network.vocabulary.mask_id
    (logits,) = ours.logits([masked])
    (expected,) = ours.masked_log_probabilities(ids, np.array([3]))
    assert np.allclose(logits[3] - np.logaddexp.reduce(logits[3]), expected[0].numpy(), atol=1e-5)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("texts", "number"),
    [
        (["ACGTACGTACNN", "ggattcgattacANNgattacc ACGT"], 1), (["AUGGCUAUGGCUAUGGCUAUG", "MKVLAA"], 1),
        (["ACGTACGTACGTACGTACGTACGT"] * 2 + ["ACGTE"], 2), (["ACGT"] * 9, 0), (["AGAGAGAGAG" * 3, "GA"], 0),
    ],
)  # fmt: skip
def test_dna_among_proteins_is_noted(
    texts: list[str], number: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nucleotides are letters of amino acids as well: only a sequence of 20 of them, and no other letter, is noted."""
    go(model, write(tmp_path / "x.fasta", texts), tmp_path / "x.npz")
    found = re.search(
        r"only A, C, G, T, U and N in (\d+) of (\d+) sequences, the first p(\d)", capsys.readouterr().err
    )
    first = next((n for n, text in enumerate(texts) if len(text) > 20), 0)
    assert (found and found.groups()) == ((str(number), str(len(texts)), str(first)) if number else None)


@pytest.mark.parametrize("text", ["nan", "None", "NULL", "#N/A"])
def test_missing_sequences_are_refused(text: str, model: Path, tmp_path: Path) -> None:
    """NA is a peptide."""
    path = write(tmp_path / "x.csv", ["MKV", "NA", text])
    with pytest.raises(UserError, match=rf"p2 .*is '{text}', a missing value: remove it, or add its sequence"):
        go(model, path, tmp_path / "x.npz")
