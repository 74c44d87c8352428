# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.predict` writes what the model computes, independent of batches and processes."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.formats.convert import convert
from tests.inference.samples import ALL, LENGTHS, go, same, sequences


def expected(theirs: EsmForMaskedLM, text: str, tokens: Callable[[str], list[int]]) -> dict[str, np.ndarray]:
    """Compute with transformers, one sequence and one masked residue at a time."""
    ids = torch.tensor([[0, *tokens(text), 2]])
    with torch.no_grad():
        out = theirs(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        masked = ids.repeat(len(text), 1)
        places = torch.arange(len(text))
        masked[places, places + 1] = 32
        log_probs = theirs(masked, attention_mask=torch.ones_like(masked)).logits[places, places + 1].log_softmax(-1)
    hidden = out.hidden_states[-1][0]
    surprise = -log_probs[places, ids[0, 1:-1]].mean()
    return {
        "embeddings": hidden[1:-1].mean(0).numpy(), "begin": hidden[0].numpy(), "hiddens": hidden[1:-1].numpy(),
        "logits": out.logits[0, 1:-1].numpy(), "pseudo_perplexity": surprise.exp().numpy(),
    }  # fmt: skip


def test_outputs_equal_those_of_transformers(
    reference: tuple[Path, EsmForMaskedLM], fasta: Path, tmp_path: Path
) -> None:
    path, other = reference
    go(path, fasta, tmp_path / "x.npz", ALL)
    found = np.load(tmp_path / "x.npz")
    assert found["id"].tolist() == [f"p{n}" for n in range(10)]
    assert found["tokens"].tolist() == [min(length, 94) for length in LENGTHS]
    table = {token: number for number, token in enumerate(bionemo.load(path).network.vocabulary.tokens)}
    for number, text in enumerate(sequences()):
        wanted = expected(other, text[:94], lambda text: [table[letter] for letter in text])
        rows = slice(*found["offsets"][number : number + 2])
        for name, values in wanted.items():
            each = found[name][rows] if name in ("hiddens", "logits") else found[name][number]
            np.testing.assert_allclose(each, values, rtol=1e-4, atol=1e-5, err_msg=f"{name} of {number}")


def test_the_default_output_is_in_the_working_directory(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[tuple[Path, str]] = []

    def lock(directory: Path, name: str) -> AbstractContextManager[None]:
        locks.append((directory, name))
        return nullcontext()

    monkeypatch.setattr("bionemo.cli.predict.run_lock", lock)
    monkeypatch.chdir(tmp_path)
    go(model, fasta, Path(), "model.data.output_fname=''")
    assert np.load(tmp_path / f"{fasta.stem}.npz")["id"].tolist() == [f"p{n}" for n in range(10)]
    assert locks == [(tmp_path, f".{fasta.stem}.npz.lock")]


def test_outputs_do_not_depend_on_batches_or_processes(model: Path, fasta: Path, tmp_path: Path) -> None:
    """Files are bitwise equal for any batches, processes and clock precision."""
    go(model, fasta, tmp_path / "one.npz", ALL)
    for name, *overrides in (
        ("single", "model.data.batch_size=1"),
        ("few", "model.data.tokens_per_batch=64"),
        ("many", "model.data.tokens_per_batch=100000", "model.data.batch_size=100000"),
    ):
        go(model, fasta, tmp_path / f"{name}.npz", ALL, *overrides)
        assert same(tmp_path / "one.npz", tmp_path / f"{name}.npz"), name


@pytest.mark.parametrize("policy", ["split", "drop"])
def test_long_sequences(
    policy: str, model: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(model, fasta, tmp_path / "x.npz", ALL, f"model.data.long_sequences={policy}")
    found, ours = np.load(tmp_path / "x.npz"), bionemo.load(model)
    texts = sequences()
    assert "p6 (record 6) and 1 more: more than 94 tokens" in capsys.readouterr().err
    if policy == "drop":
        kept = [n for n, length in enumerate(LENGTHS) if length <= 94]
        assert found["id"].tolist() == [f"p{n}" for n in kept]
        assert np.array_equal(found["embeddings"], ours.embed([texts[n] for n in kept]))
        return
    assert found["tokens"].tolist() == list(LENGTHS)
    pieces = [texts[8][:67], texts[8][67:134], texts[8][134:]]  # 200 residues in three windows
    rows = slice(*found["offsets"][8:10])
    assert np.array_equal(found["hiddens"][rows], np.concatenate(ours.hidden_states(pieces)))
    np.testing.assert_allclose(found["embeddings"][8], found["hiddens"][rows].mean(0), rtol=1e-4, atol=1e-6)
    assert np.array_equal(found["begin"][8], ours.embed(pieces[:1], "begin")[0])
    surprise = np.log(ours.pseudo_perplexity(pieces)) @ np.array([67, 67, 66]) / 200
    np.testing.assert_allclose(found["pseudo_perplexity"][8], np.exp(surprise), rtol=1e-5)
    assert np.array_equal(found["embeddings"][0], ours.embed(texts[:1])[0])


def test_max_length(model: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(model, fasta, tmp_path / "x.npz", ALL)
    [limit] = re.findall(r"p6 .record 6. and 1 more: .* truncated; ([\w.]+=\d+) accepts all", capsys.readouterr().err)
    assert limit == f"model.data.max_length={max(LENGTHS) + 2}"
    go(model, fasta, tmp_path / "whole.npz", ALL, limit)
    assert capsys.readouterr().err == ""
    found, longer = np.load(tmp_path / "whole.npz"), bionemo.load(model, max_length=max(LENGTHS) + 2)
    assert np.array_equal(found["embeddings"], longer.embed(sequences()))
    assert found["tokens"].tolist() == list(LENGTHS)


@pytest.mark.parametrize("form", ["checkpoint", "nemo"])
def test_models_in_every_format(form: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    """Embeddings of a .nemo archive equal those of the checkpoint from which it was made."""
    go(model, fasta, tmp_path / "one.npz")
    target = tmp_path / ("x.nemo" if form == "nemo" else "x")
    convert(model, tmp_path / "x")
    if form == "nemo":
        convert(tmp_path / "x", target)
    go(target, fasta, tmp_path / "two.npz")
    assert same(tmp_path / "one.npz", tmp_path / "two.npz")
