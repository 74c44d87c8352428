# SPDX-License-Identifier: Apache-2.0
"""Models of the hub by their id: what is downloaded, when, and what every error says."""

import io
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import EsmForMaskedLM

from bionemo.checkpoint import load_manifest
from bionemo.checkpoint.tools import average
from bionemo.cli.main import main
from bionemo.common.errors import HostError, UserError
from bionemo.finetuning.load_head import read_trained_head
from bionemo.formats.convert import convert, open_model
from bionemo.formats.detect import locate_model
from bionemo.formats.model_card import describe_training
from bionemo.training.resume import find_resume_checkpoint
from tests.conftest import checkpoint_command
from tests.support import finetuning
from tests.support.canaries import ENVIRONMENT, search
from tests.support.hub import COMMIT, NAME, OLDER, Hub, connect, environment, serve
from tests.support.huggingface import check_same_logits, theirs
from tests.support.runs import config, last_checkpoint, train

SINGLE = ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
OTHERS = [
    "README.md",
    "pytorch_model.bin",
    "tf_model.npz",
    "model.fp16.safetensors",
    "onnx/model.onnx",
    "code.py",
]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EsmForMaskedLM]:
    """A repository with a model in one file, its vocabulary and files that are not read."""
    path = tmp_path_factory.mktemp("hub") / "one"
    model = theirs(path)
    convert(path, path.with_name("ours"))
    convert(path.with_name("ours"), path.with_name("again"), to="hf")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(path.with_name("again") / name, path)
    for name in OTHERS:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"not read")
    return path, model


@pytest.fixture
def repository(saved: tuple[Path, EsmForMaskedLM], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved[0], tmp_path / "repository"))


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with the repository; the library uses it and an empty cache, and no token."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serve(repository) as server:
        connect(monkeypatch, tmp_path / "home", server.url)
        yield server


def error_of(model: str) -> str:
    with pytest.raises(UserError) as caught:
        locate_model(model)
    text = str(caught.value)
    may_differ_between_hosts = "in the cache" in text or "cannot be downloaded" in text
    assert isinstance(caught.value, HostError) or not may_differ_between_hosts
    assert text.isprintable()
    return text


@pytest.mark.parametrize(
    ("model", "commit"),
    [(NAME, COMMIT), (f"hf://{NAME}", COMMIT), (Path(f"hf://{NAME}"), COMMIT), (f"{NAME}@v1", OLDER),
     (f"hf://{NAME}@refs/pr/1", OLDER), (f"hf://{NAME}@{OLDER}", OLDER)],
)  # fmt: skip
def test_only_files_that_are_read_are_downloaded_once(
    model: str | Path, commit: str, hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = locate_model(model)
    assert found == tmp_path / "home" / "hub" / "models--lab--esm2" / "snapshots" / commit
    assert hub.files() == SINGLE == sorted(each.name for each in found.iterdir())
    assert all((found / name).read_bytes() == (repository / name).read_bytes() for name in SINGLE)
    assert [each.getMessage() for each in caplog.records] == [f"{model}: commit {commit} is used"]
    hub.requests.clear()
    assert locate_model(model) == found
    assert hub.requests == [] if str(model).endswith(OLDER) else len(hub.requests) == 1
    assert hub.files() == []
    hub.requests.clear()
    connect(monkeypatch, tmp_path / "home")  # offline
    assert locate_model(model) == found
    assert hub.requests == []
    out, err = capfd.readouterr()
    assert out == ""
    assert {*err.splitlines()} <= {f"note: {model}: commit {commit} is used"}  # no progress except on a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rank", ["0", "1"])
def test_progress_on_a_terminal(rank: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("RANK", rank)
    locate_model(NAME)
    assert ("Fetching 1 files: 100%" in terminal.getvalue()) == (rank == "0")
    assert bool(terminal.getvalue()) == (rank == "0")


def test_a_new_commit_is_downloaded(hub: Hub, repository: Path, tmp_path: Path) -> None:
    """Files that have not changed are not downloaded again."""
    first, newer = locate_model(NAME), Path(shutil.copytree(repository, tmp_path / "newer"))
    (newer / "config.json").write_text(json.dumps(json.loads((newer / "config.json").read_text()) | {"x": 1}))
    hub.commits[NAME]["c" * 40], hub.refs["main"] = newer, "c" * 40
    hub.requests.clear()
    second = locate_model(NAME)
    assert (first.name, second.name) == (COMMIT, "c" * 40)
    assert hub.files() == ["config.json"]
    assert sorted(each.name for each in second.iterdir()) == SINGLE


def test_shards(hub: Hub, saved: tuple[Path, EsmForMaskedLM], tmp_path: Path) -> None:
    saved[1].save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    hub.commits[NAME][COMMIT] = tmp_path / "shards"
    names = sorted(each.name for each in (tmp_path / "shards").iterdir())
    assert len([name for name in names if name.startswith("model-0")]) > 1
    check_same_logits(f"hf://{NAME}", saved[1])
    assert hub.files() == names


def test_pickles_only_without_safetensors(hub: Hub, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    (repository / "pytorch_model.bin.index.json").write_text("{}")
    (repository / "pytorch_model-00001-of-00001.bin").write_bytes(b"pickle")
    found = locate_model(NAME)
    expected = {*SINGLE, *(each.name for each in repository.glob("pytorch_model*"))} - {"model.safetensors"}
    assert {each.name for each in found.iterdir()} == expected == {*hub.files()}


def test_an_adapter_is_downloaded_without_a_model(hub: Hub, repository: Path) -> None:
    (repository / "config.json").unlink()
    (repository / "model.safetensors").rename(repository / "adapter_model.safetensors")
    (repository / "adapter_config.json").write_text("{}")
    assert {"adapter_config.json", "adapter_model.safetensors"} < {each.name for each in locate_model(NAME).iterdir()}


@pytest.mark.parametrize("forms", ["hf://", ""])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}},
         "Python code that comes with a model (auto_map) is never run, and the model_type 'mine' has no Hugging Face "
         "format here; supported: esm, "),
        ({"model_type": "llama"}, "the model_type 'llama' has no Hugging Face format here; supported: esm, "),
        ({"quantization_config": {}}, "its weights are quantized: "),
    ],
)  # fmt: skip
def test_weights_of_other_models_are_not_downloaded(
    settings: dict[str, object], expected: str, forms: str, hub: Hub, repository: Path
) -> None:
    (repository / "config.json").write_text(json.dumps({"model_type": "esm"} | settings))
    prefix = f"hf://{NAME}: " if forms else f"{NAME} (no path here, so a model of the Hugging Face hub): "
    assert error_of(forms + NAME).startswith(prefix + expected)
    assert hub.files() == [name for name in SINGLE if name != "model.safetensors"]


def test_repositories_without_a_model(hub: Hub, repository: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (repository / name).unlink()
    assert error_of(f"hf://{NAME}") == (
        f"hf://{NAME}: it has no model.safetensors or pytorch_model.bin, only README.md, code.py, config.json, "
        "model.fp16.safetensors, onnx/model.onnx, tf_model.npz, tokenizer_config.json, vocab.txt: give a model "
        f"among all files of hf download {NAME}"
    )
    (repository / "onnx" / ".gitattributes").touch()
    hub.commits[NAME][OLDER] = repository / "onnx"
    assert "v1: it has no config.json, only model.onnx: give a model among" in error_of(f"hf://{NAME}@v1")


REFUSED = "accept the conditions on its page, and set HF_TOKEN to a valid token"
MISSING = "there is no such model, or it is private or gated: check the name, or set HF_TOKEN to a valid token"
MIRROR = "does not have it (404): check the name, or set HF_ENDPOINT to another mirror"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"commits": {}}, MISSING),
        ({"status": 401}, f"access is refused (401): {REFUSED}"),
        ({"token": "needed"}, f"access is refused (401): {REFUSED}"),
        ({"status": 403, "headers": {"X_Error_Code": "GatedRepo"}}, f"access is refused (403): {REFUSED}"),
        ({"status": 403, "headers": {"X_Error_Code": "GatedRepo"}, "fails": "/resolve/"}, "access is refused (403): "),
        ({"status": 403}, f"access is refused (403): {REFUSED}"),
        ({"refs": {}}, "there is no such revision: give another branch, tag or commit"),
        ({"status": 404}, MIRROR),
        ({"status": 404, "fails": "/resolve/"}, MIRROR),
        ({"status": 418}, "(418): check the network and HF_ENDPOINT, or copy the cache of a machine"),
    ],
)  # fmt: skip
def test_answers(state: dict[str, object], expected: str, hub: Hub) -> None:
    for key, value in state.items():
        setattr(hub, key, value)
    text = error_of(f"hf://{NAME}")
    assert text.startswith(f"hf://{NAME}: ")
    assert expected in text
    assert ("HF_ENDPOINT" in text) == (hub.url in text)


def test_unreachable(monkeypatch: pytest.MonkeyPatch, hub: Hub, tmp_path: Path) -> None:
    """A model in the cache is used; the password of a mirror is hidden."""
    connect(monkeypatch, tmp_path / "home", "http://me:correct-horse@127.0.0.1:9")  # no server listens there
    assert error_of(f"hf://{NAME}@v1") == (
        f"hf://{NAME}@v1: it cannot be downloaded from http://me:***@127.0.0.1:9 (ConnectError): check the network "
        f"and HF_ENDPOINT, or copy the cache of a machine that has run hf download {NAME} --revision v1"
    )
    connect(monkeypatch, tmp_path / "home", hub.url)
    found = locate_model(f"{NAME}@v1")
    connect(monkeypatch, tmp_path / "home", "http://127.0.0.1:9")
    assert locate_model(f"{NAME}@v1") == found
    record = logging.makeLogRecord({"msg": "retrying %s", "args": ("http://me:correct-horse@127.0.0.1:9",)})
    (handler,) = logging.getLogger("huggingface_hub").handlers
    assert handler.filter(record)
    assert record.getMessage() == "retrying http://me:***@127.0.0.1:9"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    connect(monkeypatch, tmp_path / "file", hub.url)
    assert error_of(f"hf://{NAME}") == (
        f"hf://{NAME}: it cannot be downloaded (Not a directory): check the disk, or set HF_HUB_CACHE to another "
        "directory"
    )


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_offline(revision: str, monkeypatch: pytest.MonkeyPatch, hub: Hub, tmp_path: Path) -> None:
    """What is missing is reported, whether it is everything, the weights or the settings."""
    model = f"{NAME}{revision}"
    command = f"hf download {NAME}{f' --revision {revision[1:]}' if revision else ''}"
    end = f": not all of it is in the cache, and HF_HUB_OFFLINE is set: run {command} where there is a network"
    connect(monkeypatch, tmp_path / "home")
    assert error_of(model) == f"{model} (no path here, so a model of the Hugging Face hub){end}"
    for name in ("model.safetensors", "config.json"):
        connect(monkeypatch, tmp_path / "home", hub.url)
        (locate_model(model) / name).unlink()
        connect(monkeypatch, tmp_path / "home")
        assert error_of(f"hf://{model}") == f"hf://{model}{end}"


def test_caches_of_old_releases(monkeypatch: pytest.MonkeyPatch, hub: Hub, tmp_path: Path) -> None:
    """They have no list of the files of the repository."""
    found = locate_model(NAME)
    shutil.copytree(tmp_path / "home" / "hub", tmp_path / "old" / "hub", symlinks=True)
    shutil.rmtree(tmp_path / "old" / "hub" / "models--lab--esm2" / "trees")
    cache = connect(monkeypatch, tmp_path / "old")
    assert locate_model(NAME) == cache / found.relative_to(tmp_path / "home" / "hub")
    (cache / found.relative_to(tmp_path / "home" / "hub") / "model.safetensors").unlink()
    assert error_of(f"hf://{NAME}") == (
        f"hf://{NAME}: it has no model.safetensors or pytorch_model.bin, only config.json, tokenizer_config.json, "
        f"vocab.txt: give a model among all files of hf download {NAME}"
    )


def test_paths_are_no_ids(hub: Hub, tmp_path: Path) -> None:
    """A misspelt path is reported, not sent to the hub."""
    Path("lab").mkdir()
    missing = "there is no such checkpoint, .nemo archive, Hugging Face directory or .pt file"
    for path in ("lab/esm2", "lab/esm2@v1"):
        assert error_of(path) == f"{path}: {missing}; a model of the Hugging Face hub would be hf://{path}"
    for path in (
        "esm2",
        "a/b/c",
        "a--b/c",
        "a/b..c",
        "a/b.git",
        "./other/esm2",
        "../other/esm2",
        "other/-b",
        "/a/b",
        "a/",
    ):
        assert (
            error_of(path)
            == f"{Path(path)}: {missing}"
            + path.startswith("./") * "; a model of the Hugging Face hub would be hf://other/esm2"
        )
    assert locate_model("other/esm2.nemo") == Path("other/esm2.nemo")
    for path in ("hf://esm2", "hf://a/b/c", "hf://a--b/c", "hf://a/b@"):
        assert error_of(path).endswith(": a model of the Hugging Face hub is hf://ORG/NAME or hf://ORG/NAME@REVISION")
    assert hub.requests == []
    shutil.copytree(hub.commits[NAME][COMMIT], "lab/esm2")
    assert locate_model("lab/esm2") == Path("lab/esm2")
    assert hub.requests == []
    assert locate_model(f"hf://{NAME}").name == COMMIT


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = error_of(f"hf://{NAME}")
    assert re.fullmatch(
        rf"hf://{NAME} requires the extra 'hub' of bionemo \(.*\): pip install 'huggingface.hub[^']*'", text
    )


def test_the_token_is_sent_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = ENVIRONMENT["HF_TOKEN"]
    monkeypatch.setenv("HF_TOKEN", secret)
    hub.token = secret
    locate_model(NAME)
    assert hub.tokens == {f"Bearer {secret}"}
    shown = [*capfd.readouterr()]
    for token, status in ((secret, 418), (f"{secret}\vx", 200)):  # the client shows what it cannot send
        monkeypatch.setenv("HF_TOKEN", token)
        hub.status = status
        try:
            locate_model(f"{NAME}@{'d' * 40}")
        except UserError as error:
            shown += traceback.format_exception(error)
    assert search(tmp_path / "home", [*shown, *capfd.readouterr()]) == []


def test_two_processes_at_once(hub: Hub) -> None:
    """Each file is downloaded by one of them."""
    hub.delay, fork = 0.3, multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, fork, initializer=fork.Barrier(2).wait) as pool:
        paths = [*pool.map(locate_model, [NAME, f"hf://{NAME}@main"])]
    assert hub.files() == SINGLE
    assert len([each for each in hub.requests if "/revision/" in each]) == 2
    assert [path.name for path in paths] == [COMMIT, COMMIT]


def test_conversions_name_the_commit(hub: Hub, saved: tuple[Path, EsmForMaskedLM], tmp_path: Path) -> None:
    convert(NAME, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "hf", to="hf")
    convert(f"hf://{NAME}@v1", tmp_path / "x.nemo")
    convert(tmp_path / "x.nemo", tmp_path / "b")
    check_same_logits(tmp_path / "hf", saved[1])
    check_same_logits(tmp_path / "b", saved[1])
    assert f"| base model | {NAME}@{COMMIT} |\n" in (tmp_path / "hf" / "README.md").read_text()
    with tarfile.open(tmp_path / "x.nemo") as archive:
        member = archive.extractfile("./model_card.md")
        assert member is not None
        assert f"| base model | {NAME}@{OLDER} |\n" in member.read().decode()


@pytest.mark.slow
def test_another_process(hub: Hub, tmp_path: Path) -> None:
    """The library reads the environment. Nothing is shown but the commit, and the token is nowhere."""
    hub.token = ENVIRONMENT["HF_TOKEN"]
    done = subprocess.run(
        [sys.executable, "-c", "from bionemo.cli.main import main; main()", "checkpoint", "convert", NAME, "x.nemo"],
        env=os.environ | environment(tmp_path / "home", hub.url) | {"HF_TOKEN": hub.token}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == "x.nemo written\n"
    assert done.stderr == f"{NAME}: commit {COMMIT} is used\n"
    assert hub.tokens == {f"Bearer {hub.token}"}
    assert (tmp_path / "home" / "hub" / "models--lab--esm2" / "snapshots" / COMMIT).is_dir()
    assert search(tmp_path, [done.stdout, done.stderr]) == []


@pytest.mark.parametrize("entry", [None, "", "a b", "a|b@" + COMMIT, f"a/b@{COMMIT}\n# title", f"a/b@{COMMIT}|"])
def test_the_card_names_no_other_text(entry: object) -> None:
    assert describe_training({"base_model": entry}, {}) == {}


COMMANDS: dict[str, list[str]] = {
    "predict": ["predict", "MODEL", "model.data.dataset_path=x.fasta", "model.data.output_fname=x.npz"],
    "key of v1": ["predict", "model.downstream_task.restore_from_path=MODEL", "model.data.dataset_path=x.fasta",
                  "model.data.output_fname=x.npz"],
    "analysis": ["analysis", "variants", "MODEL", "--sequence", "MKT", "--scan", "--output", "scan.csv"],
    "evaluate": ["evaluate", "MODEL", "--suite", "loss", "--data", "x.fasta", "--output", "out"],
    "finetune": ["finetune", "MODEL", "data=x.csv", "model.encoder_frozen=True"],
    "finetune all": ["finetune", "MODEL", "data=x.csv", "model.encoder_frozen=False"],
    "key of finetune": ["finetune", "model.restore_encoder_path=MODEL", "data=x.csv"],
    "pretrain": ["pretrain", "--config-name=pretrain_esm2_mock", "MODEL", "exp_manager.exp_dir=out"],
    "key of pretrain": ["pretrain", "--config-name=pretrain_esm2_mock", "restore_from_path=MODEL",
                        "exp_manager.exp_dir=out"],
    "inspect": ["checkpoint", "inspect", "MODEL"],
    "convert": ["checkpoint", "convert", "model=MODEL", "x.nemo"],
}  # fmt: skip


@pytest.mark.parametrize("model", ["other/model", "hf://other/model@refs/pr/1"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(
    name: str, model: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same error shows that a command resolves its MODEL."""
    Path("x.fasta").write_text("".join(f">{n}\nMKTAYIAKQR\n" for n in range(4)))
    Path("x.csv").write_text("sequence,label\n" + "".join(f"MKTAYI{'AC'[n % 2] * n}GS,{n}.5\n" for n in range(1, 40)))
    monkeypatch.setattr(sys, "argv", ["bionemo", *(word.replace("MODEL", model) for word in COMMANDS[name])])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    label = model if model.startswith("hf:") else f"{model} (no path here, so a model of the Hugging Face hub)"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {label}: {MISSING}"
    revision = model.partition("@")[2] or "main"
    assert hub.requests == [f"GET /api/models/other/model/revision/{revision}"]


def test_checkpoints_are_not_looked_for_on_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "there is no such checkpoint|a model of the Hugging Face hub is"
    assert checkpoint_command(monkeypatch, "verify", NAME) == 1
    assert checkpoint_command(monkeypatch, "average", tmp_path / "x", f"hf://{NAME}", f"hf://{NAME}") == 1
    for model in (NAME, f"hf://{NAME}"):
        cfg = config(tmp_path / "run", f"exp_manager.resume_from_checkpoint={model}")
        with pytest.raises(UserError, match=f"{missing}"):
            find_resume_checkpoint(cfg, tmp_path, tmp_path)
    assert hub.requests == []


def test_runs_keep_the_name_of_their_base_model(hub: Hub, tmp_path: Path) -> None:
    """Also after they are resumed, averaged, and the start of another run."""
    sizes = ["model.ffn_hidden_size=96", "model.num_attention_heads=4", "model.max_position_embeddings=96"]
    first = [*sizes, "trainer.max_steps=4", "trainer.val_check_interval=2", f"restore_from_path=hf://{NAME}@v1"]
    train(config(tmp_path / "first", *first), stop_before_step=3)
    train(config(tmp_path / "first", *first, "restore_from_path=none"))
    saved = last_checkpoint(tmp_path / "first")
    assert load_manifest(saved)["step"] == 4
    train(config(tmp_path / "second", *sizes, "trainer.max_steps=2", f"restore_from_path={saved}"))
    average(tmp_path / "mean", [saved, saved])
    for path in (saved, last_checkpoint(tmp_path / "second"), tmp_path / "mean"):
        assert open_model(path).history["base model"] == f"{NAME}@{OLDER}"
    theirs(tmp_path / "local")
    train(config(tmp_path / "third", *sizes, "trainer.max_steps=2", f"restore_from_path={tmp_path / 'local'}"))
    assert open_model(last_checkpoint(tmp_path / "third")).history["base model"] == "local"
    other = tmp_path / "other"
    train(config(other, *sizes, "trainer.max_steps=2"))
    assert "base model" not in open_model(last_checkpoint(other)).history


@pytest.mark.slow
def test_a_fine_tuned_model_keeps_the_name_of_its_base_model(hub: Hub, tmp_path: Path) -> None:
    data, directory = finetuning.written(tmp_path / "data"), tmp_path / "run"
    given = finetuning.overrides(Path(NAME), data, directory)
    finetuning.run(*given, "model.encoder_frozen=False", "trainer.max_epochs=1")
    saved = open_model(last_checkpoint(directory))
    assert saved.history["base model"] == f"{NAME}@{COMMIT}"
    again = finetuning.overrides(Path(NAME), data, tmp_path / "again")
    finetuning.run(*again, "model.encoder_frozen=False", "exp_manager.create_checkpoint_callback=False")
    report = json.loads((tmp_path / "again" / "report.json").read_text())
    assert report["encoder"].endswith(f"models--lab--esm2/snapshots/{COMMIT}")
    with safe_open(tmp_path / "again" / "head.safetensors", "pt") as file:  # a name in a file is no id
        task = json.loads(file.metadata()["task"]) | {"encoder": NAME}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(weights, tmp_path / "head.safetensors", {"task": json.dumps(task)})
    assert read_trained_head(tmp_path / "head.safetensors").encoder == Path(NAME).absolute()
