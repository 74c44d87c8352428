"""Canary secrets under secret names and in URLs occur in no file and in no output of any command."""

import gzip
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

from bionemo.cli.analysis import main as analyse
from bionemo.cli.launch import launch as launch_job
from bionemo.cli.launch import main as launch
from bionemo.cli.plan import main as plan
from bionemo.cli.predict import main as predict
from bionemo.cli.preprocess import main as preprocess
from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed, load
from bionemo.config.paths import find_source
from bionemo.config.schema import RunConfig
from tests.conftest import checkpoint_command
from tests.support.canaries import ENVIRONMENT, NAMES, URLS, search
from tests.support.finetuning import written
from tests.support.launches import BCP
from tests.support.runs import MOCK, TINY, last_checkpoint, run

WANDB = "exp_manager.wandb_logger_kwargs"
CLUSTERS = {"bcm": ["cluster=bcm", "trainer.devices=8"], "bcp": BCP, "mpi": ["cluster=mpi"], "ray": ["cluster=ray"],
            "local": []}  # fmt: skip
TREE = {"named": NAMES, "plain": URLS, "listed": [*URLS.values()]}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@contextmanager
def exits(status: int) -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        assert int(end.code or 0) == status
    else:
        assert status == 0


def configured(directory: Path) -> list[str]:
    """Return a file with every canary, and overrides with every canary that the command line accepts."""
    logger = {"config": TREE, "tags": [URLS["port"]], "settings": {"api_key": ENVIRONMENT["WANDB_API_KEY"]}}
    tracking = {"tracking_uri": URLS["download"], "tags": NAMES}
    made = {
        "defaults": ["pretrain_esm2_8M", "_self_"],
        "desc": "\n".join(URLS.values()),
        "exp_manager": {"wandb_logger_kwargs": logger, "mlflow_logger_kwargs": tracking},
    }
    directory.mkdir()
    (directory / "canary.yaml").write_text(yaml.safe_dump(made))
    arguments = [f"++{WANDB}.config.again.{name}={value}" for name, value in NAMES.items()]
    arguments += [f"++{WANDB}.config.url{i}={url}" for i, url in enumerate(URLS.values())]
    arguments += [f"++{WANDB}.config.env_{name}=${{oc.env:{name}}}" for name in ENVIRONMENT]
    arguments += [f"{WANDB}.notes=${{oc.env:WANDB_API_KEY}}", f"{WANDB}.group=run-${{oc.env:HF_TOKEN}}"]
    arguments += ["cluster=bcm"]
    arguments += [f"cluster.env_vars={{WANDB_API_KEY: {NAMES['api_key']}, PLAIN: '${{oc.env:GITHUB_PAT}}'}}"]
    return [f"--config-dir={directory}", "--config-name=canary", *arguments]


def pretrained(tmp_path: Path) -> tuple[Path, list[str]]:
    """Run a pretraining with every canary; return its directory and its console lines."""
    arguments = configured(tmp_path / "conf")
    directory = tmp_path / "out" / "run"
    directory.parent.mkdir()
    status, lines = run(
        directory, *arguments, "exp_manager.create_wandb_logger=True", f"{WANDB}.offline=True",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True", "name=canary", "trainer.max_steps=2",
        "trainer.val_check_interval=2", "do_testing=False", HOME=str(tmp_path / "home"), **ENVIRONMENT,
    )  # fmt: skip
    assert status == 0, "\n".join(lines)
    return directory, lines


def test_pretraining_and_exports(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, lines = pretrained(tmp_path)
    names = " ".join(path.name for path in directory.rglob("*"))
    for kind in (
        "config.yaml",
        "hparams.yaml",
        "state.json",
        ".nemo",
        ".wandb",
        "cmd-args.log",
        "tfevents",
        "nemo_log",
    ):
        assert kind in names
    saved = last_checkpoint(directory)
    made = tmp_path / "out"
    for arguments in (
        ("convert", saved, made / "a.nemo"), ("convert", saved, made / "hf", "--to=hf"), ("inspect", saved),
        ("average", made / "mean", saved, saved), ("convert", made / "a.nemo", made / "again"), ("verify", saved),
    ):  # fmt: skip
        checkpoint_command(monkeypatch, *arguments)
    assert (made / "a.nemo").exists()
    assert (made / "hf").exists()
    assert (made / "again").exists()
    assert search(made, [*lines, *capfd.readouterr()]) == []
    # the redacted file is still a valid configuration
    again, _ = compose_typed(find_source("config", directory), ["trainer.max_steps=3"], RunConfig)
    assert (again.model.hidden_size, again.trainer.max_steps, again.name) == (32, 3, "canary")
    assert again.exp_manager.wandb_logger_kwargs.offline is True


def test_the_search_finds_canaries_in_every_type_of_file(tmp_path: Path) -> None:
    secret = NAMES["api_key"]
    (tmp_path / "plain.yaml").write_text(f"a: {secret[:6]}\\\n  {secret[6:]}\n")
    (tmp_path / "data.gz").write_bytes(gzip.compress(secret.encode()))
    np.savez_compressed(tmp_path / "x.npz", note=np.array(secret))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["note"] = secret
    with tarfile.open(tmp_path / "x.nemo", "w:gz") as archive:
        archive.add(tmp_path / "plain.yaml", "model_config.yaml")
    (tmp_path / secret).touch()
    hits = search(tmp_path, [f"key {ENVIRONMENT['DB_PASS']}"])
    for place in ("plain.yaml", "data.gz", "x.npz", "x.h5", "x.nemo", "name of"):
        assert any(hit.startswith(place) for hit in hits), place
    assert any(hit.startswith("output") for hit in hits)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_jobs_reject_secrets_that_would_be_written(
    cluster: str, tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*TINY, *MOCK, f"exp_manager.exp_dir={tmp_path}/run", *CLUSTERS[cluster]]
    monkeypatch.setattr(sys, "argv", ["launch.py", "--config-name=pretrain_esm2_8M", *arguments, "name=canary"])
    with exits(0):
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--dry-run"])
        launch()
    assert search(tmp_path, list(capfd.readouterr())) == []
    cfg = load("pretrain_esm2_8M", arguments)
    given = [{"config": {name: value}} for name, value in NAMES.items()]
    given += [{kind: [value]} for value in URLS.values() for kind in ("notes", "tags")]
    given += [{"notes": f"a {value} b"} for value in ENVIRONMENT.values()] if cluster != "bcp" else []
    for arguments in given:
        for key, value in {"config": None, "notes": None, "tags": None, **arguments}.items():
            setattr(cfg.exp_manager.wandb_logger_kwargs, key, value)
        with pytest.raises(UserError, match=r"contains a secret|the value of \$"):
            launch_job(cfg, dry_run=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    capfd.readouterr()
    for extra in (f"+hydra.job.env_set.API_KEY={NAMES['api_key']}", f"cluster.env_vars={{API_KEY: {NAMES['token']}}}",
                  "name=${oc.env:WANDB_API_KEY}", f"++{WANDB}.tags=['{URLS['download']}']"):  # fmt: skip
        for flags in ([], ["--dry-run"]):
            monkeypatch.setattr(
                sys,
                "argv",
                ["launch.py", "--config-name=pretrain_esm2_8M", *arguments, "cluster=local", extra, *flags],
            )
            with exits(1):
                launch()
    assert search(tmp_path, list(capfd.readouterr())) == []


class _Guarded(SimpleHTTPRequestHandler):
    """Serves files to clients with a password and rejects others."""

    seen: list[str] = []  # noqa: RUF012 (of the test)

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization", "") + self.path)
        if "Authorization" not in self.headers:
            self.send_error(401, "no access")
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_preparation_and_downloads(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    served, made = tmp_path / "served", tmp_path / "made"
    served.mkdir()
    records = "".join(f">p{i}\nMKTAYIAKQRQISFVK{'LAGV' * (i + 1)}\n" for i in range(40))
    (served / "x.fasta.gz").write_bytes(gzip.compress(records.encode()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Guarded, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_address[1]}"
    sources = {
        "user": f"http://user:{NAMES['password']}@{host}/x.fasta.gz",
        "env": f"http://user:${{oc.env:HF_TOKEN}}@{host}/x.fasta.gz",
        "absent": f"http://user:{NAMES['password']}@{host}/absent.gz",
        "unreachable": f"http://user:{NAMES['token']}@{host}x/absent.gz",
    }

    def prepare(name: str, *arguments: str) -> Callable[[], None]:
        monkeypatch.setattr(
            sys, "argv", ["preprocess", f"source={sources[name]}", f"output={made}/{name}", "val_size=2", *arguments]
        )
        return preprocess

    for name in ("user", "env"):
        with exits(0):
            prepare(name)()
        with exits(0):  # already prepared
            prepare(name)()
        assert (made / name / "manifest.json").exists()
    sources["user"] = f"http://user:another-password@{host}/x.fasta.gz"
    with exits(0):  # the same data with other credentials
        prepare("user")()
    for name in ("absent", "unreachable"):
        with exits(1):
            prepare(name)()
    server.shutdown()
    assert any(seen.startswith("Basic ") for seen in _Guarded.seen)  # the credentials were used
    out, err = capfd.readouterr()
    assert search(made, [out, err]) == []
    assert "was refused with 404" in err


@pytest.mark.slow
def test_other_commands(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = pretrained(tmp_path)
    saved, made = last_checkpoint(directory), tmp_path / "made"
    made.mkdir()
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">p{i}\nMKTAYIAKQRQISFVK{'LAGV' * (i + 1)}\n" for i in range(8)))
    monkeypatch.chdir(made)
    for kind in ("h5", "npz", "csv", "parquet"):
        outputs = "[embeddings,hiddens]" if kind in ("h5", "npz") else "[embeddings]"
        monkeypatch.setattr(
            sys, "argv",
            ["predict", f"model.downstream_task.restore_from_path={saved}", f"model.data.dataset_path={fasta}",
             f"model.data.output_fname={made}/x.{kind}", "trainer.accelerator=cpu", "trainer.precision=32",
             f"model.downstream_task.outputs={outputs}", "trainer.devices=1"],
        )  # fmt: skip
        with exits(0):
            predict()
        assert (made / f"x.{kind}").exists()
    monkeypatch.setattr(
        sys,
        "argv",
        ["plan", "--config-name=canary", f"--config-dir={tmp_path / 'conf'}", *TINY, *MOCK],
    )
    with exits(0):
        plan()
    monkeypatch.setattr(
        sys, "argv", ["analysis", "map", f"--input={made}/x.npz", "--method=pca", f"--output={made}/map.csv"]
    )
    with exits(0):
        analyse()
    task = tmp_path / "task"
    written(task)
    for frozen in ("True", "False"):
        status, lines = run(
            made / f"tuned-{frozen}", f"model.restore_encoder_path={saved}", f"model.encoder_frozen={frozen}",
            f"model.data.dataset_path={task}", "model.micro_batch_size=10", "trainer.max_epochs=1",
            f"++{WANDB}.config.note='{URLS['download']}'",
            model="task", **ENVIRONMENT,
        )  # fmt: skip
        assert status == 0, "\n".join(lines)
        assert search(made, lines) == []
    assert search(made, list(capfd.readouterr())) == []
    for arguments in (
        [f"model.api_key={NAMES['apikey']}"], [f"trainer.max_steps={ENVIRONMENT['GITHUB_PAT']}"],
        [f"source={URLS['download']}", f"--password={NAMES['password']}"], ["--token", NAMES["token"]],
        ["name=${oc.env:WANDB_API_KEY}"], [f"model.data.dataset_path={URLS['database']}"], ["--cfg", "job"],
        [f"++{WANDB}.config={{token: {NAMES['token']}}}", "--cfg", "job"],
    ):  # fmt: skip
        status, lines = run(made / "mistake", *arguments, **ENVIRONMENT)
        assert search(made, lines) == [], arguments
