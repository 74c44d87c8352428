"""cluster=k8s: the approved manifest, the schemas of Kubernetes and Kubeflow, errors, secrets, a run in two pods."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bionemo.launch.shell import _yaml
from tests.conftest import ROOT
from tests.launch.stubs import Stubs
from tests.launch.test_launchers import port
from tests.support.launches import launch
from tests.support.runs import fingerprint, logged, run_on_ranks, tiny

APPROVED = Path(__file__).parent / "golden" / "k8s.txt"
BASE = ["cluster=k8s", "cluster.image=example/bionemo:1", "trainer.devices=8", "trainer.num_nodes=2",
        "exp_manager.exp_dir=/data/runs/gpt3", "cluster.volumes=[claim:/data]", "name=GPT-3 126m"]  # fmt: skip
FULL = [
    "cluster.namespace=team", "cluster.image_pull_secrets=[registry]", "cluster.volumes=[claim:/data, other:/in/:RO]",
    "cluster.secrets=[wandb:api-key:WANDB_API_KEY, hub:HF_TOKEN]", "cluster.cpu=96", "cluster.memory=900Gi",
    "cluster.env_vars={NCCL_DEBUG: INFO}", "cluster.node_selector={gpu: h100}", "cluster.tolerations=[nvidia.com/gpu]",
    "cluster.priority_class=low",
]  # fmt: skip


def manifest(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the PyTorchJob and the ConfigMap."""
    job, config_map = yaml.safe_load_all(text)
    return job, config_map


def render(monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert launch(monkeypatch, here, *BASE, *more, "--dry-run") == 0
    assert not list(here.iterdir())
    return capsys.readouterr().out


def test_the_manifest_equals_the_approved_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To approve changes, run with BIONEMO_APPROVE=1 and review the diff. The configuration is left out."""
    text = render(monkeypatch, tmp_path, capsys, *FULL).replace(str(tmp_path), "HERE")
    found = text.partition("_hydra.yaml: |\n")[0]
    assert found != text
    if os.environ.get("BIONEMO_APPROVE"):
        APPROVED.write_text(found)
    assert found == APPROVED.read_text()


@pytest.mark.parametrize(
    "more", [[], FULL, ["trainer.num_nodes=1", "trainer.accelerator=cpu"], ["exp_manager.resume_if_exists=False"]]
)
def test_the_manifest_agrees_with_the_schemas(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official clients read it, check types and required keys, and write it again without losing a key."""
    training = pytest.importorskip("kubeflow.training")
    kubernetes = pytest.importorskip("kubernetes.client")
    documents = manifest(render(monkeypatch, tmp_path, capsys, *more))
    client = kubernetes.ApiClient()
    for document, kind in zip(documents, (training.KubeflowOrgV1PyTorchJob, kubernetes.V1ConfigMap), strict=True):
        monkeypatch.setattr(kubernetes.models, kind.__name__, kind, raising=False)
        for name in vars(training):
            if name.startswith("KubeflowOrgV1"):
                monkeypatch.setattr(kubernetes.models, name, getattr(training, name), raising=False)
        response = SimpleNamespace(data=json.dumps(document))
        assert client.sanitize_for_serialization(client.deserialize(response, kind.__name__)) == document
    job, config_map = documents
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert list(specs) == (["Master"] if "trainer.num_nodes=1" in more else ["Master", "Worker"])
    resumes = "exp_manager.resume_if_exists=False" not in more
    for spec in specs.values():
        assert spec["restartPolicy"] == ("OnFailure" if resumes else "Never")
        (container,) = spec["template"]["spec"]["containers"]
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == ("trainer.accelerator=cpu" not in more)
        named = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert named == {mount["name"] for mount in container["volumeMounts"]}
    assert job["spec"]["runPolicy"]["backoffLimit"] == (100 if resumes else 0)
    ((key, text),) = config_map["data"].items()
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", key)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert yaml.safe_load(text)["exp_manager"]["explicit_log_dir"] == "/data/runs/gpt3/results"


def test_a_name_that_yaml_reads_as_a_boolean_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, config_map = manifest(render(monkeypatch, tmp_path, capsys, "name=on"))
    assert (job["metadata"]["name"], config_map["metadata"]["name"]) == ("on", "on-config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster.image=null"], "missing value: set cluster.image=..., a container image with bionemo"),
        (["cluster.volumes=[]"], "exp_manager.exp_dir=/data/runs/gpt3 is on none of cluster.volumes, so checkpoints"),
        (["cluster.volumes=[claim:/data:RO]"], "is on none of cluster.volumes"),
        (["cluster.volumes=[claim]"], "cluster.volumes is 'claim', expected CLAIM:/DIRECTORY"),
        (["do_testing=True"], "cluster=k8s starts one step"),
        (["cluster.secrets=[wandb]"], "cluster.secrets[0] must be the NAME of a secret"),
        (["cluster.image_pull_secrets=[Abcdefgh12345678]"], "cluster.image_pull_secrets[0] must be the NAME"),
        (["cluster.env_vars={WANDB_API_KEY: canary-1-key}"], "contains a secret"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert launch(monkeypatch, tmp_path, *BASE, *arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "canary" not in error
    assert not list(tmp_path.iterdir())


def test_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No secret of the environment is written or passed on the command line."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.setenv("WANDB_API_KEY", "canary-0-wandb")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert launch(patch, here, *BASE) == 1
    assert "kubectl was not found: install and configure it, then kubectl create -f" in capsys.readouterr().err
    stubs = Stubs(tmp_path / "bin")
    stubs.add("kubectl", "print('pytorchjob.kubeflow.org/gpt-3-126m created')")
    assert launch(monkeypatch, here, *BASE, *FULL, path=stubs.directory) == 0
    (file,) = here.iterdir()
    assert capsys.readouterr().out == (
        "pytorchjob.kubeflow.org/gpt-3-126m created\nlogs: kubectl logs --follow gpt-3-126m-master-0\n"
    )
    create = ["kubectl", "create", "-f", str(file)]
    assert stubs.calls() == [[*create, "--dry-run=server"], create]
    assert "canary" not in file.read_text() + str(stubs.calls())
    stubs.add("kubectl", "print('Error (AlreadyExists): exists', file=sys.stderr); sys.exit(1)")
    assert launch(monkeypatch, here, *BASE, path=stubs.directory) == 1
    assert f"AlreadyExists): exists; kubectl delete -f {file} removes an earlier job" in capsys.readouterr().err


@pytest.mark.slow
def test_two_pods_with_two_processes_equal_four_local_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the pods runs with the variables that the operator sets."""
    sizes = tiny("trainer.num_nodes=2", "trainer.devices=2", "model.hidden_dropout=0.1", "name=esm")
    monkeypatch.chdir(tmp_path)
    volume = [f"cluster.volumes=[claim:{tmp_path}]", f"exp_manager.exp_dir={tmp_path / 'run'}"]
    assert launch(monkeypatch, tmp_path, *sizes, "cluster=k8s", "cluster.image=x", *volume, "--dry-run") == 0
    job, config_map = manifest(capsys.readouterr().out)
    (config := tmp_path / "config").mkdir()
    for name, text in config_map["data"].items():
        (config / name).write_text(text)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    pods = []
    for rank, spec in enumerate(job["spec"]["pytorchReplicaSpecs"].values()):
        (container,) = spec["template"]["spec"]["containers"]
        operator = {
            **address, **{f"PET_{name}": value for name, value in address.items()}, "WORLD_SIZE": "4",
            "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NNODES": "2", "PYTHONUNBUFFERED": "1",
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        }  # fmt: skip
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        command = shlex.join(container["command"]).replace("/etc/bionemo", str(config))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **operator, **given}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        pods.append(subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=tmp_path, env=environment))
    assert [pod.wait(600) for pod in pods] == [0, 0]
    ended = run_on_ranks(tmp_path / "local", "model.hidden_dropout=0.1", ranks=4)
    assert [status for status, _ in ended] == [0] * 4, ended
    results = tmp_path / "run" / "results"
    assert logged(results, "reduced_train_loss") == logged(tmp_path / "local", "reduced_train_loss")
    assert fingerprint(results) == fingerprint(tmp_path / "local")


@pytest.mark.parametrize("value", ["a\nb: c", "x: y", "270", "it's é", "- a", "#c", f"{'a' * 200} b", "null", "\t"])
def test_values_keep_their_text_in_the_manifest(value: str) -> None:
    assert yaml.safe_load(f"a:\n  - b: {_yaml(value)}\n    c: d") == {"a": [{"b": value, "c": "d"}]}
