# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.predict`: what is in the files is what the model computes, however it was computed."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.config.compose import load
from bionemo.config.schema import InferConfig
from bionemo.errors import UserError
from bionemo.inference import run as running
from bionemo.interop.convert import convert
from bionemo.predict import predict

from ..conftest import ROOT
from ..interop.test_huggingface_esm import theirs

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
LENGTHS = (10, 1, 57, 90, 33, 2, 130, 41, 200, 12)  # the model reads 94
ALL = "model.downstream_task.outputs=[embeddings,begin,hiddens,logits,pseudo_perplexity]"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EsmForMaskedLM]:
    path = tmp_path_factory.mktemp("model") / "hf"
    return path, theirs(path)


@pytest.fixture
def model(reference: tuple[Path, EsmForMaskedLM]) -> Path:
    return reference[0]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LETTERS", {True: 150, False: 150})


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """Ten sequences, some on several lines."""
    path = tmp_path / "x.fasta"
    path.write_text(
        "".join(f">p{n} text\n{text[:60]}\n{text[60:]}\n".replace("\n\n", "\n") for n, text in enumerate(sequences()))
    )
    return path


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list(RESIDUES), length)) for length in lengths]


def go(model: Path, data: Path, output: Path, *words: str) -> None:
    given = [f"model.downstream_task.restore_from_path={model}", f"model.data.dataset_path='{data}'",
             f"model.data.output_fname={output}", "trainer.accelerator=cpu"]  # fmt: skip
    predict(load("predict", [*given, *words], schema=InferConfig))


def expected(theirs: EsmForMaskedLM, text: str, tokens: Callable[[str], list[int]]) -> dict[str, np.ndarray]:
    """By transformers, one sequence at a time, one masked residue at a time."""
    ids = torch.tensor([[0, *tokens(text), 2]])
    with torch.no_grad():
        out = theirs(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        masked = ids.repeat(len(text), 1)
        places = torch.arange(len(text))
        masked[places, places + 1] = 32
        said = theirs(masked, attention_mask=torch.ones_like(masked)).logits[places, places + 1].log_softmax(-1)
    hidden = out.hidden_states[-1][0]
    surprise = -said[places, ids[0, 1:-1]].mean()
    return {
        "embeddings": hidden[1:-1].mean(0).numpy(), "begin": hidden[0].numpy(), "hiddens": hidden[1:-1].numpy(),
        "logits": out.logits[0, 1:-1].numpy(), "pseudo_perplexity": surprise.exp().numpy(),
    }  # fmt: skip


def test_outputs_are_those_of_transformers(
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


def test_nothing_depends_on_what_is_computed_together(model: Path, fasta: Path, tmp_path: Path) -> None:
    """Batches, processes, precision of the clock: to the last bit the same file."""
    go(model, fasta, tmp_path / "one.npz", ALL)
    for name, *words in (
        ("single", "model.data.batch_size=1"),
        ("few", "model.data.tokens_per_batch=64"),
        ("many", "model.data.tokens_per_batch=100000", "model.data.batch_size=100000"),
    ):
        go(model, fasta, tmp_path / f"{name}.npz", ALL, *words)
        one, other = np.load(tmp_path / "one.npz"), np.load(tmp_path / f"{name}.npz")
        assert all(np.array_equal(one[key], other[key]) for key in one.files), name


def command(model: Path, data: Path, output: Path, *words: str) -> list[str]:
    given = [f"model.downstream_task.restore_from_path={model}", f"model.data.dataset_path={data}",
             f"model.data.output_fname={output}", "trainer.accelerator=cpu", ALL]  # fmt: skip
    return [sys.executable, "-m", "bionemo.predict", *given, *words]


def test_any_number_of_processes_writes_the_same_file(model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "one.npz", ALL)
    told = subprocess.run(
        command(model, fasta, tmp_path / "two.npz", "trainer.devices=2"), cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout) == (0, f"10 sequences: {tmp_path / 'two.npz'}\n"), told.stderr
    one, two = np.load(tmp_path / "one.npz"), np.load(tmp_path / "two.npz")
    assert all(np.array_equal(one[key], two[key]) for key in one.files)


def test_a_killed_prediction_goes_on(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its third part; the other two are not computed again."""
    computed: list[int] = []
    stopped: list[int] = []
    compute = running._compute_part

    def stop(prediction: Any, model: Any, number: int, *rest: Any) -> None:
        if number == 2 and not stopped:
            stopped.append(number)
            raise SystemError
        computed.append(number)
        compute(prediction, model, number, *rest)

    monkeypatch.setattr(running, "_compute_part", stop)
    with pytest.raises(SystemError):
        go(model, fasta, tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()
    go(model, fasta, tmp_path / "x.npz", "model.data.batch_size=1")
    assert computed == sorted(set(computed))
    go(model, fasta, tmp_path / "whole.npz")
    one, other = np.load(tmp_path / "x.npz"), np.load(tmp_path / "whole.npz")
    assert all(np.array_equal(one[key], other[key]) for key in one.files)
    assert not (tmp_path / "x.npz.parts").exists()


def test_parts_of_another_prediction_are_not_taken(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "finish", lambda prediction: 0)
    monkeypatch.setattr("bionemo.predict.print", lambda *words: None, raising=False)
    go(model, fasta, tmp_path / "x.npz")
    assert len(list((tmp_path / "x.npz.parts").glob("part-*"))) > 2
    monkeypatch.undo()
    monkeypatch.setattr(running, "_LETTERS", {True: 150, False: 150})
    fasta.write_text(">a\nMKT\n")
    go(model, fasta, tmp_path / "x.npz")
    assert "holds parts of another prediction: they are removed" in capsys.readouterr().err
    assert np.load(tmp_path / "x.npz")["id"].tolist() == ["a"]


def test_a_process_that_dies_ends_all(model: Path, fasta: Path, tmp_path: Path) -> None:
    """The second of two is killed as soon as it is there."""
    fasta.write_text("".join(f">{n}\n{text}\n" for n, text in enumerate(sequences((90,) * 4000))))
    process = subprocess.Popen(
        command(model, fasta, tmp_path / "x.npz", "trainer.devices=2"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not (child := _child(process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert child
        os.kill(child, signal.SIGKILL)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert told.splitlines()[-1] == "error: process 1 of 2 has ended with status -9"


def _child(pid: int) -> int | None:
    """A process of the same program that this one has started."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = file.read_text().rsplit(")", 1)[1].split()
            if int(state[1]) == pid and b"bionemo.predict" in (file.parent / "cmdline").read_bytes():
                return int(file.parent.name)
        except OSError:
            continue
    return None


# formats


@pytest.mark.parametrize("kind", ["h5", "pt", "parquet", "pkl"])
def test_formats_hold_the_same(kind: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    words = ["model.downstream_task.outputs=[embeddings,hiddens,pseudo_perplexity]"]
    go(model, fasta, tmp_path / "x.npz", *words)
    go(model, fasta, tmp_path / f"x.{kind}", *words)
    one = np.load(tmp_path / "x.npz")
    read = {"h5": from_h5, "pt": from_pt, "parquet": from_parquet, "pkl": from_pkl}[kind]
    for key, values in read(tmp_path / f"x.{kind}").items():
        assert np.array_equal(one[key], values), key


def from_h5(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        assert set(file) == {"id", "tokens", "offsets", "embeddings", "hiddens", "pseudo_perplexity"}
        return {name: np.array(each.asstr()[:] if name == "id" else each) for name, each in file.items()}


def from_pt(path: Path) -> dict[str, np.ndarray]:
    found = torch.load(path, weights_only=True)
    assert len(found) == 6
    return {name: np.array(each) for name, each in found.items()}


def from_parquet(path: Path) -> dict[str, np.ndarray]:
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [len(row["hiddens"]) for row in rows] == [row["tokens"] for row in rows]
    return {
        "id": np.array([row["id"] for row in rows]),
        "tokens": np.array([row["tokens"] for row in rows]),
        "embeddings": np.array([row["embeddings"] for row in rows], np.float32),
        "pseudo_perplexity": np.array([row["pseudo_perplexity"] for row in rows], np.float32),
        "hiddens": np.concatenate([np.array(row["hiddens"], np.float32) for row in rows]),
    }


def from_pkl(path: Path) -> dict[str, np.ndarray]:
    """As v1 has it; it is our own."""
    rows = pickle.loads(path.read_bytes())
    assert [row["sequence"] for row in rows] == sequences()
    return {
        "id": np.array([row["id"] for row in rows]),
        "embeddings": np.stack([row["embeddings"] for row in rows]),
        "pseudo_perplexity": np.stack([row["pseudo_perplexity"] for row in rows]),
        "hiddens": np.concatenate([row["hiddens"] for row in rows]),
    }


def test_a_table_of_numbers(model: Path, fasta: Path, tmp_path: Path) -> None:
    words = ["model.downstream_task.outputs=[embeddings,pseudo_perplexity]"]
    go(model, fasta, tmp_path / "x.npz", *words)
    go(model, fasta, tmp_path / "x.csv", *words)
    one, table = np.load(tmp_path / "x.npz"), pyarrow.csv.read_csv(tmp_path / "x.csv")
    assert table.column_names[:3] == ["id", "tokens", "embeddings_0"]
    assert table["id"].to_pylist() == one["id"].tolist()
    columns = [table[f"embeddings_{i}"].to_numpy().astype(np.float32) for i in range(32)]
    assert np.array_equal(np.stack(columns, 1), one["embeddings"])
    assert np.array_equal(table["pseudo_perplexity"].to_numpy().astype(np.float32), one["pseudo_perplexity"])


# inputs


@pytest.mark.parametrize("kind", ["csv", "named.csv", "tsv", "v1.csv", "shards"])
def test_inputs_mean_the_same(kind: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "one.npz")
    rows = list(enumerate(sequences()))
    words, path = [], tmp_path / f"x.{kind}"
    match kind:
        case "csv":
            path.write_text("name,sequence,id\n" + "".join(f"-,{text},p{n}\n" for n, text in rows))
        case "named.csv":
            path.write_text("protein,letters\n" + "".join(f"p{n},{text}\n" for n, text in rows))
            words = ["model.data.data_fields_map.sequence=letters", "model.data.data_fields_map.id=protein"]
        case "tsv":
            path.write_text("id\tsequence\n" + "".join(f"p{n}\t{text}\n" for n, text in rows))
        case "v1.csv":
            path.write_text("a,b,c\n" + "".join(f"p{n},,{text}\n" for n, text in rows))
            words = ["model.data.data_impl=csv_fields_mmap",
                     "model.data.data_impl_kwargs.csv_fields_mmap.data_fields={id: 0, sequence: 2}"]  # fmt: skip
        case "shards":
            for shard in range(5):
                lines = "".join(f"p{n},{text}\n" for n, text in rows[2 * shard : 2 * shard + 2])
                (tmp_path / f"s{shard}.csv").write_text("id,sequence\n" + lines)
            path = tmp_path / "s[0..4].csv"
    go(model, path, tmp_path / "two.npz", *words)
    one, two = np.load(tmp_path / "one.npz"), np.load(tmp_path / "two.npz")
    assert all(np.array_equal(one[key], two[key]) for key in one.files)


@pytest.mark.parametrize("policy", ["split", "drop"])
def test_long_sequences(
    policy: str, model: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(model, fasta, tmp_path / "x.npz", ALL, f"model.data.long_sequences={policy}")
    found, ours = np.load(tmp_path / "x.npz"), bionemo.load(model)
    texts = sequences()
    assert "p6 (record 6): more than 94 tokens" in capsys.readouterr().err
    if policy == "drop":
        kept = [n for n, length in enumerate(LENGTHS) if length <= 94]
        assert found["id"].tolist() == [f"p{n}" for n in kept]
        assert np.array_equal(found["embeddings"], ours.embed([texts[n] for n in kept]))
        return
    assert found["tokens"].tolist() == list(LENGTHS)
    pieces = [texts[8][:67], texts[8][67:134], texts[8][134:]]  # 200 in three
    rows = slice(*found["offsets"][8:10])
    assert np.array_equal(found["hiddens"][rows], np.concatenate(ours.hiddens(pieces)))
    np.testing.assert_allclose(found["embeddings"][8], found["hiddens"][rows].mean(0), rtol=1e-4, atol=1e-6)
    assert np.array_equal(found["begin"][8], ours.embed(pieces[:1], "begin")[0])
    surprise = np.log(ours.pseudo_perplexity(pieces)) @ np.array([67, 67, 66]) / 200
    np.testing.assert_allclose(found["pseudo_perplexity"][8], np.exp(surprise), rtol=1e-5)
    assert np.array_equal(found["embeddings"][0], ours.embed(texts[:1])[0])


@pytest.mark.parametrize("form", ["checkpoint", "nemo"])
def test_models_of_every_form(form: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    """A .nemo archive's embeddings are those of the directory it was made from."""
    go(model, fasta, tmp_path / "one.npz")
    target = tmp_path / ("x.nemo" if form == "nemo" else "x")
    convert(model, tmp_path / "x")
    if form == "nemo":
        convert(tmp_path / "x", target)
    go(target, fasta, tmp_path / "two.npz")
    one, two = np.load(tmp_path / "one.npz"), np.load(tmp_path / "two.npz")
    assert all(np.array_equal(one[key], two[key]) for key in one.files)


# mistakes


def mistake(model: Path, data: Path, output: Path, *words: str) -> str:
    """The one line that is told; nothing is left behind."""
    before = sorted(output.parent.iterdir()) if output.parent.exists() else None
    with pytest.raises(UserError) as caught:
        go(model, data, output, *words)
    after = (
        sorted(path for path in output.parent.iterdir() if ".idx-" not in path.name) if before is not None else None
    )
    assert after == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.fasta", ">a\nMKT\n>b\n123\n", "b (record 1) has no letter that the model knows ('123')"),
        ("x.csv", "id,sequence\na,MKT\nb,\n", "a record without a sequence|b .record 1. is empty"),
        ("x.csv", "id,seq\na,MKT\n", "has no column 'sequence', but 'id', 'seq': name it"),
        ("x.csv", "id,sequence\n", "holds no records beyond its 1 header line"),
        ("x.fasta", "id,sequence\na,MKT\n", "text before the first '>': is this a FASTA file?"),
        ("x.pdb", "ATOM\n", "what kind of file is that? Known are .fasta, .fa"),
        ("x.csv.gz", "MKT", "what kind of file is that?"),
    ],
)
def test_files_of_the_wrong_kind(name: str, content: str, told: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "out").mkdir()
    said = mistake(model, tmp_path / name, tmp_path / "out" / "x.npz")
    assert any(part in said for part in told.replace(".record 1.", "(record 1)").split("|")), said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.data.long_sequences=error"], "p6 (record 6) has 130 tokens, the model reads 94 at most"),
        (
            ["model.downstream_task.outputs=[hidden]"],
            "model.downstream_task.outputs is ['hidden'], expected a list of",
        ),
        (["model.data.output_format=xlsx"], "model.data.output_format is 'xlsx', expected one of npz"),
        (["model.data.output_format=csv", "model.downstream_task.outputs=[hiddens]"], "a CSV file has no place for"),
        (["trainer.num_nodes=2"], "no launcher has started this process"),
        (["trainer.devices=0"], "trainer.devices=0, but there are 1"),
        (["model.data.dataset_path=none.fasta"], "none.fasta is missing (model.data.dataset_path)"),
        (["model.downstream_task.restore_from_path=none"], "none: there is no such checkpoint, .nemo archive"),
    ],
)
def test_mistakes(words: list[str], told: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert told in mistake(model, fasta, tmp_path / "out" / "x.npz", *words)


def test_what_is_there_stays(model: Path, fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "x.npz"
    output.write_text("mine")
    assert f"{output} exists: name another" in mistake(model, fasta, output)
    assert output.read_text() == "mine"
    go(model, fasta, output, "model.data.overwrite=True")
    assert len(np.load(output)["id"]) == 10
    assert "ends in none of .npz, .h5" in mistake(model, fasta, tmp_path / "out" / "x.foo")
