# SPDX-License-Identifier: Apache-2.0
"""Conversion of `.jsonl` to Megatron's indexed datasets: Megatron reads the expected tokens; output is atomic."""

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bionemo.megatron  # noqa: F401  # prepares the host
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import PreparationConfig
from bionemo.preparation import megatron_corpus, pool, prepare
from bionemo.preparation.inputs import read_line_blocks
from bionemo.tokenizers.gpt2 import read_gpt2
from tests.conftest import ROOT
from tests.support.bpe import TEXTS, write_bpe

Prepare = Callable[..., list[list[int]]]
MANY = [f"{TEXTS[number % 3]} {number}" for number in range(200)]


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_START_METHOD", "spawn")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def prepare_text(files: tuple[Path, Path], tmp_path: Path) -> Iterator[Prepare]:
    """Prepare a source and return the documents read by Megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def run(*overrides: str, source: str = "", output: Path = tmp_path / "out" / "text") -> list[list[int]]:
        arguments = [f"source={source or tmp_path / 'a.jsonl'}", f"output={output}", "num_preprocess_workers=1"]
        arguments += [f"vocab_file={files[0]}", f"merge_file={files[1]}", *overrides]
        prepare(load("text", arguments, CONF_DIR / "preparation", PreparationConfig))
        found = IndexedDataset(str(output))
        assert found.document_indices.tolist() == list(range(len(found) + 1))
        assert sorted(path.name for path in output.parent.iterdir()) == [f"{output.name}.bin", f"{output.name}.idx"]
        return [document.tolist() for document in found]

    yield run


def write(path: Path, lines: list[Any]) -> Path:
    """Write objects as JSON and bytes unchanged."""
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return path


def test_every_document_is_its_tokens_and_an_eod_token(
    prepare_text: Prepare, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.jsonl", [{"text": text, "id": 1} for text in TEXTS])
    tokenizer = read_gpt2(*files)
    expected = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert prepare_text() == [[*ids, tokenizer.eod_id] for ids in expected]
    tokens = sum(map(len, expected)) + 3
    assert f"a.jsonl: 3 documents read, 3 written with {tokens} tokens\n" in capsys.readouterr().out
    assert prepare_text("append_eod=False", "force=True") == expected


def test_workers_and_block_sizes_do_not_change_the_result(
    prepare_text: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": text} for text in MANY])
    one = prepare_text()
    monkeypatch.setattr(megatron_corpus, "_BLOCK_BYTES", 1 << 10)
    assert prepare_text(output=tmp_path / "two" / "text") == one
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert prepare_text("num_preprocess_workers=2", output=tmp_path / "three" / "text") == one
    assert len(one) == len(MANY)
    assert len({path.read_bytes() for path in tmp_path.glob("*/text.bin")}) == 1
    assert len({path.read_bytes() for path in tmp_path.glob("*/text.idx")}) == 1
    assert source.stat().st_size > 10 << 10


def test_several_files_gzip_another_key_and_a_missing_line_end(prepare_text: Prepare, tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl", [b"\xef\xbb\xbf", {"body": "one"}, b"\n", b"  \r\n", b'{"body": "two"}']
    )  # no line end
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(b'{"body": "three"}\r\n{"body": "four"}\n')
    names = [f"{tmp_path}/{name}" for name in ("a.jsonl", "b.jsonl.gz")]
    both = prepare_text("json_key=body", source=f"[{','.join(names)}]")
    parts = [prepare_text("json_key=body", source=name, output=tmp_path / name[-1] / "text") for name in names]
    assert both == parts[0] + parts[1]
    assert list(map(len, parts)) == [2, 2]
    for name in names:  # progress counts bytes on disk
        assert sum(lines.size for lines in read_line_blocks(Path(name), name, 1 << 10)) == Path(name).stat().st_size


def test_a_large_vocabulary_is_written_in_32_bits(
    prepare_text: Prepare, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = json.loads(files[0].read_text())
    vocab.update({f"<{number}>": number for number in range(len(vocab), 70_000)})
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    write(tmp_path / "a.jsonl", [{"text": "the protein"}])
    found = prepare_text(f"vocab_file={tmp_path / 'vocab.json'}")
    assert found == prepare_text("force=True")
    data = np.fromfile(tmp_path / "out" / "text.bin", np.uint16)
    assert data.tolist() == found[0]  # in the second run 16 bits are enough
    prepare_text(f"vocab_file={tmp_path / 'vocab.json'}", "force=True")
    assert np.fromfile(tmp_path / "out" / "text.bin", np.int32).tolist() == found[0]


INVALID = [
    (b"{'text': 1}\n", "a line that is not JSON"), (b'{"text": "a"\n', "a line that is not JSON"),
    (b"[" * 100_000 + b"\n", "a line that is not JSON"), (b'["text"]\n', "a line that is not a JSON object"),
    (b'"text"\n', "a line that is not a JSON object"), (b'{"txt": "a"}\n', "a line that is not a JSON object"),
    (b'{"text": null}\n', "a line that is not a JSON object"),
    (b'{"text": ["a"]}\n', "a line that is not a JSON object"),
    (b'{"text": "\xff"}\n', "text that is not UTF-8"), (b'{"text": "\\ud800"}\n', "the .text. contains an unpaired"),
    (b'{"text": ' + b"9" * 5000 + b"}\n", "a line that is not JSON"), (b"\0\0\n", "a line that is not JSON"),
]  # fmt: skip


def test_policies(prepare_text: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, empty = {"text": "one"}, {"text": ""}
    for line, message in INVALID:
        write(tmp_path / "a.jsonl", [good, b"\n", line, empty])
        with pytest.raises(UserError, match=rf"a\.jsonl:3: {message}.*on_invalid=skip") as caught:
            prepare_text()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "a.jsonl", [good, empty, *(line for line, _ in INVALID), good])
    with pytest.raises(UserError, match=r"a\.jsonl:2: a document without text: .*on_empty=skip"):
        prepare_text("on_invalid=skip")
    assert len(prepare_text("on_invalid=skip", "on_empty=skip")) == 2
    count = len(INVALID)
    message = f"{count + 3} documents read, 2 written with 8 tokens, 1 dropped (empty), {count} dropped (invalid)"
    assert message in capsys.readouterr().out
    write(tmp_path / "a.jsonl", [empty])
    with pytest.raises(UserError, match=r"1 documents read, 1 dropped \(empty\), no documents remain"):
        prepare_text("on_empty=skip", output=tmp_path / "none" / "text")
    assert not (tmp_path / "none").exists()


def test_the_old_output_is_kept_until_the_new_one_is_complete(prepare_text: Prepare, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    one = prepare_text()
    with pytest.raises(UserError, match=r"text\.bin exists already: .*force=True"):
        prepare_text()
    write(tmp_path / "a.jsonl", [{"text": "two"}, b"junk\n"])
    with pytest.raises(UserError, match="not JSON"):
        prepare_text("force=True")
    write(tmp_path / "b.jsonl", [{"text": "one"}])
    assert prepare_text(source=str(tmp_path / "b.jsonl"), output=tmp_path / "again" / "text") == one
    assert (tmp_path / "out" / "text.bin").read_bytes() == (tmp_path / "again" / "text.bin").read_bytes()
    stage = tmp_path / "out" / ".text.preparing"  # of a killed job
    stage.mkdir()
    for name in ("bin", "idx"):
        (stage / name).write_bytes(bytes(10_000))
    assert prepare_text("on_invalid=skip", "force=True") != one


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["vocab_file=null"], "needs vocab_file, but only merge_file="),
        (["merge_file=/nowhere.txt"], "/nowhere.txt are not the files of one GPT-2 vocabulary"),
        (["output=/"], "give a directory and a name"),
        (["on_empty=keep"], "on_empty"),
        (["output=/proc/text/a"], "/proc/text cannot be written"),
    ],
)
def test_mistakes(prepare_text: Prepare, tmp_path: Path, overrides: list[str], message: str) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(UserError, match=message) as caught:
        prepare_text(*overrides)
    assert "\n" not in str(caught.value)


def test_damaged_gzip(prepare_text: Prepare, tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"text": "one"}).encode() + b"\n")
    (tmp_path / "a.jsonl").write_bytes(data[:-4])
    with pytest.raises(UserError, match=r"a\.jsonl: the gzip data is truncated or damaged"):
        prepare_text()


@pytest.mark.slow
def test_from_the_command_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": text} for text in MANY])
    command = [sys.executable, "-m", "bionemo.preprocess", "--config-name=text", f"source={tmp_path / 'a.jsonl'}",
               f"output={tmp_path / 'out' / 'text'}", f"vocab_file={files[0]}", f"merge_file={files[1]}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "200 documents read, 200 written with" in done.stdout
    assert done.stdout.endswith(f"prepared: {tmp_path / 'out' / 'text'}.bin, {tmp_path / 'out' / 'text'}.idx\n")
    assert not done.stderr


@pytest.mark.parametrize("call", range(2))
@pytest.mark.parametrize("replaced", [False, True])
def test_an_error_between_the_moves(
    prepare_text: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, replaced: bool
) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    write(tmp_path / "b.jsonl", [{"text": "two"}])
    two, out = prepare_text(source=str(tmp_path / "b.jsonl"), output=tmp_path / "two" / "text"), tmp_path / "out"
    one = prepare_text() if replaced else two
    done, real = 0, os.replace

    def failing(source: Path, target: Path) -> None:
        nonlocal done
        if ".preparing" in f"{source}{target}":
            done += 1
            if done > call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    overrides = ["force=True"] if replaced else []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(UserError, match="no space left on the disk"):
            prepare_text(*overrides, source=str(tmp_path / "b.jsonl"))
    assert prepare_text("force=True", source=str(tmp_path / "b.jsonl")) == two
    assert len(one) == len(two) and sorted(path.name for path in out.iterdir()) == ["text.bin", "text.idx"]


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_files_of_other_origin_are_not_replaced(prepare_text: Prepare, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    mine = tmp_path / "out" / f"text.{kind}"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(UserError, match=rf"text\.{kind} does not belong to an indexed data set: move it away"):
        prepare_text("force=True")
