# SPDX-License-Identifier: Apache-2.0
"""`bionemo evaluate --suite loss`: losses, groups, search of training data, faulty sequences."""

import gzip
import math
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.evaluation import loss, similarity
from bionemo.evaluation.loss import Loss
from bionemo.evaluation.similarity import find_identities
from bionemo.evaluation.tasks import Problems
from tests.conftest import ROOT
from tests.support import evaluation
from tests.support.evaluation import read_section
from tests.support.huggingface import theirs

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
LONGEST = 94  # residues of the model
SAMPLE = ROOT.parent / "shared" / "data" / "proteins" / "uniref90_sample.fasta"


def random_protein(generator: random.Random, length: int) -> str:
    return "".join(generator.choices(AMINO_ACIDS, k=length))


def mutate(generator: random.Random, text: str, identity: float) -> str:
    """Replace residues such that exactly this share is unchanged, rounded up."""
    letters, changed = list(text), generator.sample(range(len(text)), int(len(text) * (1 - identity)))
    for place in changed:
        letters[place] = generator.choice([each for each in AMINO_ACIDS if each != letters[place]])
    return "".join(letters)


GENERATOR = random.Random(11)
LENGTHS = [*(GENERATOR.randint(10, LONGEST) for _ in range(26)), 95, 150, 300, 2]
PROTEINS = [random_protein(GENERATOR, length) for length in LENGTHS]


def write_fasta(path: Path, proteins: list[str], first: int = 0) -> None:
    lines = []
    for number, each in enumerate(proteins, first):
        family = "" if number % 3 == 2 else f" family=group {number % 3} Tax=x"
        lines.append(f">p{number} some protein{family}\n{each[:60]}\n{each[60:]}\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    theirs(path)
    return path


@pytest.fixture(scope="module")
def test_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held_out.fasta"
    write_fasta(path, PROTEINS)
    return path


arguments = partial(evaluation.arguments, "loss")
evaluate = partial(evaluation.evaluate, "loss")


def rows_of(section: dict[str, Any]) -> dict[int, tuple[float, int]]:
    rows = [row for each in section["results"] for row in each.get("sequences", [])]
    return {row["number"]: (row["loss"], row["targets"]) for row in rows}


def test_pseudo_perplexities_equal_those_of_transformers(model: Path, test_file: Path, tmp_path: Path) -> None:
    section = evaluate(model, test_file, tmp_path / "out", "--method=pseudo-perplexity")
    reference, ours = EsmForMaskedLM.from_pretrained(model).eval(), bionemo.load(model, "cpu")
    total = 0.0
    for number, (text, (found, targets)) in enumerate(zip(PROTEINS, rows_of(section).values(), strict=True)):
        ids = torch.tensor([0, *ours.ids([text])[0].tolist(), 2]) if len(text) <= LONGEST else None
        if ids is not None:
            copies = ids.repeat(len(text), 1)
            places = torch.arange(len(text))
            copies[places, places + 1] = 32
            with torch.no_grad():
                logits = reference(copies, attention_mask=torch.ones_like(copies)).logits
            expected = -logits[places, places + 1].log_softmax(-1)[places, ids[1:-1]].sum().item()
            assert found == pytest.approx(expected, rel=1e-5), number
        assert targets == len(text)
        total += found
    assert section["summary"]["all"]["loss"] == pytest.approx(total / sum(LENGTHS))
    assert section["summary"]["all"]["perplexity"] == pytest.approx(math.exp(total / sum(LENGTHS)))


def test_a_longer_protein_is_read_as_a_whole(model: Path, tmp_path: Path) -> None:
    """A model with rotary positions accepts it with --max-length; otherwise it is cut into parts."""
    text = random_protein(random.Random(1), LONGEST + 20)
    write_fasta(tmp_path / "x.fasta", [text])
    more = ["--method=pseudo-perplexity", f"--max-length={len(text) + 2}"]
    found = evaluate(model, tmp_path / "x.fasta", tmp_path / "out", *more)["summary"]["all"]["loss"]
    cut = evaluate(model, tmp_path / "x.fasta", tmp_path / "cut", more[0])["summary"]["all"]["loss"]
    whole = bionemo.load(model, "cpu", max_length=len(text) + 2)
    ids = torch.tensor([0, *whole.ids([text])[0].tolist(), 2])
    copies, places = ids.repeat(len(text), 1), torch.arange(len(text))
    copies[places, places + 1] = 32
    with torch.no_grad():
        logits = EsmForMaskedLM.from_pretrained(model).eval()(copies, torch.ones_like(copies)).logits
    expected = -logits[places, places + 1].log_softmax(-1)[places, ids[1:-1]].mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert cut != pytest.approx(expected, rel=1e-5)


def test_masked_losses_equal_those_of_transformers(
    model: Path, test_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks are recorded and given to the reference, which computes the loss of each part of a protein."""
    calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    original = loss.ResidueMasker.__call__

    def record(self: Any, tokens: np.ndarray, keys: np.ndarray, lengths: np.ndarray) -> Any:
        places, ids = original(self, tokens, keys, lengths)
        calls.append((tokens.copy(), places, ids))
        return places, ids

    monkeypatch.setattr(loss.ResidueMasker, "__call__", record)
    section = evaluate(model, test_file, tmp_path / "out")
    assert len(calls) == 26 + 2 + 2 + 4 + 1  # 95, 150 and 300 residues have 2, 2 and 4 parts
    reference = EsmForMaskedLM.from_pretrained(model).eval()
    losses = []
    for tokens, places, ids in calls:
        labels = torch.full((1, len(tokens)), -100)
        labels[0, places] = torch.from_numpy(ids.astype(np.int64))
        row = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            output = reference(row, attention_mask=torch.ones_like(row), labels=labels)
        losses.append(output.loss.item() * len(places))
    found = rows_of(section)
    assert sum(value for value, _ in found.values()) == pytest.approx(sum(losses), rel=1e-5)
    assert found[0][0] == pytest.approx(losses[0], rel=1e-5)
    assert found[26][0] == pytest.approx(losses[26] + losses[27], rel=1e-5)
    assert found[26][1] == len(calls[26][1]) + len(calls[27][1])
    share = sum(count for _, count in found.values()) / sum(LENGTHS)
    assert 0.1 < share < 0.2
    masked = np.concatenate([tokens[places] == 32 for tokens, places, _ in calls])
    assert 0.7 < masked.mean() < 0.9


def test_groups_are_weighted_means(model: Path, test_file: Path, tmp_path: Path) -> None:
    section = evaluate(model, test_file, tmp_path / "out")
    rows, summary = rows_of(section), section["summary"]

    def mean(numbers: list[int]) -> float:
        return sum(rows[n][0] for n in numbers) / sum(rows[n][1] for n in numbers)

    for name, low, high in (("below 128", 0, 128), ("128 to 256", 128, 256), ("256 to 512", 256, 512)):
        numbers = [n for n, length in enumerate(LENGTHS) if low <= length < high]
        assert summary["lengths"][name]["loss"] == pytest.approx(mean(numbers))
        assert summary["lengths"][name]["sequences"] == len(numbers)
    assert set(summary["families"]) == {"group 0", "group 1"}
    assert summary["families"]["group 1"]["loss"] == pytest.approx(mean(list(range(1, 30, 3))))
    # standard error of a ratio by the jackknife, which is close to the linearization
    values = [mean([n for n in rows if n != left_out]) for left_out in rows]
    jackknife = (len(values) - 1) / len(values) ** 0.5 * np.std(values)
    assert summary["all"]["error"] == pytest.approx(jackknife, rel=0.1)


@pytest.mark.slow
def test_results_do_not_depend_on_processes_and_tasks(
    model: Path, test_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = evaluate(model, test_file, tmp_path / "one")
    monkeypatch.setitem(loss.METHODS, "masked", 7)
    several = evaluate(model, test_file, tmp_path / "several")
    assert len(several["results"]) == 5
    assert rows_of(several).keys() == rows_of(one).keys()
    for number, (value, targets) in rows_of(one).items():
        assert rows_of(several)[number] == (pytest.approx(value, rel=1e-6), targets)
    command = [sys.executable, "-m", "bionemo.cli", "evaluate"]
    subprocess.run([*command, *arguments(model, test_file, tmp_path / "two", "--devices=2")], check=True)
    assert rows_of(read_section(tmp_path / "two")) == rows_of(one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write training data, and relatives of it with 100, 70, 40 % identity, and unrelated proteins, 10 each."""
    generator, data = random.Random(3), tmp_path / "data"
    data.mkdir()
    training = [random_protein(generator, generator.randint(80, LONGEST)) for _ in range(60)]
    held_out = [
        mutate(generator, training[number], identity)
        for number, identity in enumerate([1.0] * 10 + [0.7] * 10 + [0.4] * 10)
    ]
    held_out += [random_protein(generator, 85) for _ in range(10)]
    write_fasta(data / "train.fasta", training)
    write_fasta(data / "test.fasta", held_out)
    return data


TOOLS = ["k-mers", pytest.param("MMseqs2", marks=pytest.mark.skipif(not shutil.which("mmseqs"), reason="no MMseqs2"))]


@pytest.mark.parametrize("tool", TOOLS)
def test_relatives_in_the_training_data(
    tool: str, model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tool == "k-mers":
        monkeypatch.setattr(similarity.shutil, "which", lambda _: None)
    section = evaluate(model, folder, tmp_path / "out")
    summary, rows = section["summary"], rows_of(section)
    assert summary["search"].startswith(tool)
    assert summary["without"]["90%"]["sequences"] == 30
    assert summary["without"]["50%"]["sequences"] == 20
    missed = {"MMseqs2": 2, "k-mers": 6}[tool]  # of the relatives with 40 % identity
    assert 10 <= summary["without"]["30%"]["sequences"] <= 10 + missed
    identities = next(each["identities"] for each in section["results"] if each["task"] == "identity")
    assert identities[:10] == [1.0] * 10
    assert identities[10:20] == pytest.approx([0.7] * 10, abs=0.04)
    assert max(identities[30:]) == 0
    kept = [number for number in rows if identities[number] < 0.9]
    expected = sum(rows[n][0] for n in kept) / sum(rows[n][1] for n in kept)
    assert summary["without"]["90%"]["loss"] == pytest.approx(expected)
    assert sum(each["sequences"] for each in summary["identities"].values()) == 40
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h3>identities</h3>" in page
    assert summary["search"] in page


def test_the_coverage_of_a_short_match_is_too_low(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generator = random.Random(5)
    training, protein = random_protein(generator, 60), random_protein(generator, 100)
    (tmp_path / "train.fasta").write_text(f">a\n{training}\n>b\nMK\n")
    monkeypatch.setattr(similarity.shutil, "which", lambda _: None)
    proteins = [training + protein, training[:-20], protein, "MKU*", "MK"]
    found = find_identities(proteins, tmp_path / "train.fasta")
    assert found.values.tolist() == [0, 1, 0, 2 / 3, 1]  # of MKU, two residues equal those of MK


TRAINING = [random_protein(random.Random(n), 60 + 7 * n) for n in range(30)] + [
    "MAQEFIEACRSG", "SIINFEKL", "Q" * 60, f"MKTAYIAK{'Q' * 30}RQISFVKS", "GS" * 25, "PPGPAGPPGLTGARGLAGPPGPPGPAGPPG",
]  # fmt: skip
NAMED = {  # protein, identity
    "copy": (TRAINING[0], 1), "soft-masked copy": (TRAINING[1][:30].lower() + TRAINING[1][30:], 1),
    "copy with a stop codon": (f"{TRAINING[2]}*", 1), "spaced copy": (" ".join(TRAINING[3]), 1),
    "collagen": (TRAINING[35], 1), "peptide": ("SIINFEKL", 1), "substitution in 8": ("SIINFEKM", 7 / 8),
    "substitution in 12": ("MAQEFIDACRSG", 11 / 12), "peptide without its first residue": ("AQEFIEACRSG", 1),
    "longer peptide": ("MAQEFIEACRSGK", 12 / 13), "new peptide": ("WWCWHWYW", 0),
    "peptide of a protein": (TRAINING[5][9:20], 1), "polyglutamine": ("Q" * 40, 1), "shorter": ("Q" * 29, 1),
    "repeat": ("GS" * 12 + "GA" + "GS" * 12, 49 / 50),
    "fragment": (TRAINING[6][10:60], 1), "new": (random_protein(random.Random(99), 90), 0), "X": ("X" * 30, math.nan),
    "XXX": ("XXX", math.nan), "short X": ("SIXNFEKL", 7 / 8),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_identities(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The identities of hand-made cases, which do not depend on the tool."""
    if tool == "k-mers":
        monkeypatch.setattr(similarity.shutil, "which", lambda _: None)
    (tmp_path / "train.fasta").write_text("".join(f">{n}\n{each}\n" for n, each in enumerate(TRAINING)))
    found = find_identities([text for text, _ in NAMED.values()], tmp_path / "train.fasta")
    assert found.tool.startswith(tool)
    identities = dict(zip(NAMED, found.values.tolist(), strict=True))
    assert identities == pytest.approx({name: identity for name, (_, identity) in NAMED.items()}, nan_ok=True)


def test_proteins_that_were_not_searched_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(similarity.shutil, "which", lambda _: None)
    (tmp_path / "train.fasta").write_text(f">a\n{PROTEINS[0]}\n")
    records = {"copy": PROTEINS[0], "masked": "X" * 30, "new": f"{PROTEINS[1][:40]}J:J--", "Xs": "XX"}
    (tmp_path / "test.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in records.items()))
    summary = evaluate(model, tmp_path, tmp_path / "out")["summary"]
    output = capsys.readouterr().out
    assert summary["not_searched"] == ["masked", "Xs"]
    assert "1 of 4 sequences have a relative with at least 90% identity" in output
    assert "not searched, because they have too few known residues: masked, Xs" in output
    assert "letters unknown to the model, each read as an unknown residue: 'J' 2, ':' 1" in output
    assert "gaps, read as gaps and not as residues (remove them from aligned sequences): '-' 2" in output
    assert summary["without"]["90%"]["sequences"] == 1
    assert sum(each["sequences"] for each in summary["identities"].values()) == 2


def test_mmseqs_searches_without_masks_and_e_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mmseqs"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/arguments\n[ "$1" = version ] || touch "$4"\n')
    program.chmod(0o755)
    monkeypatch.setattr(similarity.shutil, "which", lambda _: str(program))
    (tmp_path / "train.fasta").write_text(f">a\n{PROTEINS[0]}\n")
    find_identities([PROTEINS[0], PROTEINS[1]], tmp_path / "train.fasta")
    arguments = (tmp_path / "arguments").read_text().splitlines()[0]
    assert "-e inf --mask 0 --comp-bias-corr 0" in arguments


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.exists() or not shutil.which("mmseqs"), reason="needs shared data and MMseqs2")
def test_recall_of_the_k_mer_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of real proteins and relatives with random substitutions, it finds nearly all that MMseqs2 finds."""
    generator = random.Random(0)
    records = [each["sequence"] for each in loss.read_fasta(SAMPLE)]
    training = [each for each in records if 50 < len(each) < 600][:800]
    proteins = [
        mutate(generator, each, identity)
        for each, identity in zip(training[:200], [0.35, 0.45, 0.6, 0.95] * 50, strict=True)
    ]
    (tmp_path / "train.fasta").write_text("".join(f">{n}\n{each}\n" for n, each in enumerate(training)))
    theirs = find_identities(proteins, tmp_path / "train.fasta").values
    monkeypatch.setattr(similarity.shutil, "which", lambda _: None)
    ours = find_identities(proteins, tmp_path / "train.fasta").values
    for identity, recall in ((0.9, 1.0), (0.5, 0.99), (0.3, 0.9)):
        assert (ours >= identity)[theirs >= identity].mean() >= recall, identity
        assert (theirs >= identity).sum() >= 50


def test_faulty_sequences(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "x.fasta"
    data.write_text(f">a\n{PROTEINS[0]}\n>digits\n1234\n>b\n{PROTEINS[1]}\n")
    with pytest.raises(SystemExit):
        evaluate(model, data, tmp_path / "stops")
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "x.fasta, sequence 2 (digits)" in error
    section = evaluate(model, data, tmp_path / "goes", "--keep-going")
    assert section["faulty_rows"] == 1
    assert section["summary"]["all"]["sequences"] == 2
    assert list(rows_of(section)) == [0, 2]


@pytest.mark.parametrize("method", ["masked", "pseudo-perplexity"])
def test_a_model_of_another_kind(method: str, tmp_path: Path) -> None:
    """It is not a fault of the sequences, which `--keep-going` would count."""
    (tmp_path / "x.fasta").write_text(f">a\n{PROTEINS[0]}\n")
    (task,) = Loss(tmp_path / "x.fasta", method=method).tasks()
    other: Any = SimpleNamespace(network=object(), path="prott5nv.nemo")
    with pytest.raises(UserError, match=r"prott5nv\.nemo is a object, not a masked language model"):
        task.run(other, Problems(keep_going=True))


def test_files_and_settings_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method='x' is unknown: choose from masked, pseudo-perplexity"):
        Loss(tmp_path, method="x").tasks()
    with pytest.raises(UserError, match=r"test\.fasta"):
        Loss(tmp_path).tasks()
    (tmp_path / "train.fasta.gz").write_bytes(gzip.compress(b">a\nMK\n"))
    with pytest.raises(UserError, match=r"train\.fasta\.gz is compressed, and records are read in place: run `gunzip"):
        Loss(tmp_path).tasks()
    (tmp_path / "train.fasta.gz").unlink()
    (tmp_path / "test.fasta").write_text("no header\n")
    with pytest.raises(UserError, match="text before the first '>'"):
        Loss(tmp_path).tasks()
    (tmp_path / "test.fasta").write_text(">a\nMK\n>empty\n\n>b\nMK\n")
    with pytest.raises(UserError, match=r"test\.fasta:3: a record without a sequence: remove or complete it"):
        Loss(tmp_path).tasks()


def test_an_error_of_mmseqs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mmseqs"
    program.write_text("#!/bin/sh\necho Can not write to disk\necho Error: search died >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(similarity.shutil, "which", lambda _: str(program))
    (tmp_path / "train.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFSRQ\n")
    with pytest.raises(UserError) as error:
        find_identities(["MKTAYIAKQRMISFVKSHFSRQ"], tmp_path / "train.fasta")
    assert str(error.value) == (
        "mmseqs easy-search failed with status 3: Error: search died: check the free memory and disk space"
    )
