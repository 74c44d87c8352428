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

APPROVED = {api: Path(__file__).parent / "golden" / name for api, name in (("v1", "k8s.txt"), ("v2", "k8s_v2.txt"))}
BASE = ["cluster=k8s", "cluster.image=example/bionemo:1", "trainer.devices=8", "trainer.num_nodes=2",
        "exp_manager.exp_dir=/data/runs/gpt3", "cluster.volumes=[claim:/data]", "name=GPT-3 126m"]  # fmt: skip
FULL = [
    "cluster.namespace=team", "cluster.image_pull_secrets=[registry]", "cluster.volumes=[claim:/data, other:/in/:RO]",
    "cluster.secrets=[wandb:api-key:WANDB_API_KEY, hub:HF_TOKEN]", "cluster.cpu=96", "cluster.memory=900Gi",
    "cluster.env_vars={NCCL_DEBUG: INFO}", "cluster.node_selector={gpu: h100}", "cluster.tolerations=[nvidia.com/gpu]",
]  # fmt: skip
RDMA = ["cluster.annotations={k8s.v1.cni.cncf.io/networks: net0}", "cluster.resources={rdma/ib: 8}"]
V1 = ["cluster.api=v1", "cluster.priority_class=low"]
SEVERAL: list[list[str]] = [[], [*FULL, *RDMA], ["trainer.num_nodes=1", "trainer.accelerator=cpu"]]


def manifest(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job and the ConfigMap."""
    job, config_map = yaml.safe_load_all(text)
    return job, config_map


def render(monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert launch(monkeypatch, here, *BASE, *more, "--dry-run") == 0
    assert not list(here.iterdir())
    return capsys.readouterr().out


@pytest.mark.parametrize("api", APPROVED)
def test_the_manifest_equals_the_approved_file(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To approve changes, run with BIONEMO_APPROVE=1 and review the diff. The configuration is left out."""
    more = V1 if api == "v1" else RDMA
    text = render(monkeypatch, tmp_path, capsys, *FULL, *more).replace(str(tmp_path), "HERE")
    found = text.partition("_hydra.yaml: |\n")[0]
    assert found != text
    if os.environ.get("BIONEMO_APPROVE"):
        APPROVED[api].write_text(found)
    assert found == APPROVED[api].read_text()


@pytest.mark.parametrize("more", [*SEVERAL, ["cluster.priority_class=low"], ["exp_manager.resume_if_exists=False"]])
def test_a_pytorchjob_agrees_with_the_schemas(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official clients read it, check types and required keys, and write it again without losing a key."""
    training = pytest.importorskip("kubeflow.training")
    kubernetes = pytest.importorskip("kubernetes.client")
    documents = manifest(render(monkeypatch, tmp_path, capsys, "cluster.api=v1", *more))
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
        check_pod(spec["template"]["spec"], container["resources"], more)
        assert spec["template"]["spec"].get("priorityClassName") == (
            "low" if "cluster.priority_class=low" in more else None
        )
    assert job["spec"]["runPolicy"]["backoffLimit"] == (100 if resumes else 0)
    check_config_map(job, config_map)


@pytest.mark.parametrize("more", SEVERAL)
def test_a_trainjob_agrees_with_the_schemas(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The models of the client drop unknown keys; the document that they write again has lost none."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job, config_map = manifest(render(monkeypatch, tmp_path, capsys, *more))
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer, (patch,) = job["spec"]["trainer"], job["spec"]["runtimePatches"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (1 if "trainer.num_nodes=1" in more else 2, 8)
    assert not any(entry["name"].startswith("PET_") for entry in trainer["env"])  # the operator refuses them
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]
    # the job and the container that the operator gives the PET_* variables
    assert replicated["name"] == pod["spec"]["containers"][0]["name"] == "node"
    assert "env" not in pod["spec"]["containers"][0]  # the operator refuses them in a patch
    check_pod(pod["spec"], trainer["resourcesPerNode"], more)
    annotations = {"k8s.v1.cni.cncf.io/networks": "net0"} if RDMA[0] in more else None
    assert pod["metadata"].get("annotations") == annotations
    check_config_map(job, config_map)


def check_pod(pod: dict[str, Any], resources: dict[str, Any], more: list[str]) -> None:
    """Check that all volumes are mounted, and the resources."""
    mounts = pod["containers"][0]["volumeMounts"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in mounts}
    assert resources["requests"] == resources["limits"]
    assert resources["limits"].get("nvidia.com/gpu") == (None if "trainer.accelerator=cpu" in more else "8")
    assert resources["limits"].get("rdma/ib") == ("8" if RDMA[1] in more else None)


def check_config_map(job: dict[str, Any], config_map: dict[str, Any]) -> None:
    ((key, text),) = config_map["data"].items()
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", key)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert yaml.safe_load(text)["exp_manager"]["explicit_log_dir"] == "/data/runs/gpt3/results"


@pytest.mark.parametrize(("api", "suffix"), [("v1", "-worker-127"), ("v2", "-node-0-127-abcde")])
def test_names_of_pods_have_at_most_63_characters(
    api: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, _ = manifest(render(monkeypatch, tmp_path, capsys, f"cluster.api={api}", f"name={'a' * 80}"))
    assert 60 <= len(job["metadata"]["name"] + suffix) <= 63


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
        (["cluster.priority_class=low"], "cluster.priority_class=low: the runtime of a TrainJob decides this"),
        (["cluster.max_restarts=3"], "cluster.max_restarts=3: the runtime of a TrainJob decides this"),
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


@pytest.mark.parametrize(
    ("api", "pod"),
    [
        (["cluster.api=v1"], "gpt-3-126m-master-0"),
        ([], "-l jobset.sigs.k8s.io/jobset-name=gpt-3-126m,batch.kubernetes.io/job-completion-index=0"),
    ],
)
def test_submission(
    api: list[str], pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No secret of the environment is written or passed on the command line."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.setenv("WANDB_API_KEY", "canary-0-wandb")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert launch(patch, here, *BASE) == 1
    assert "kubectl was not found: install and configure it, then kubectl create -f" in capsys.readouterr().err
    stubs = Stubs(tmp_path / "bin")
    stubs.add("kubectl", "print('created')")
    assert launch(monkeypatch, here, *BASE, *FULL, *api, path=stubs.directory) == 0
    (file,) = here.iterdir()
    assert capsys.readouterr().out == f"created\nlogs: kubectl logs --follow {pod}\n"
    create = ["kubectl", "create", "-f", str(file)]
    assert stubs.calls() == [[*create, "--dry-run=server"], create]
    assert "canary" not in file.read_text() + str(stubs.calls())
    stubs.add("kubectl", "print('Error (AlreadyExists): exists', file=sys.stderr); sys.exit(1)")
    assert launch(monkeypatch, here, *BASE, path=stubs.directory) == 1
    assert f"AlreadyExists): exists; kubectl delete -f {file} removes an earlier job" in capsys.readouterr().err


def pods_of(job: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return container and variables of each pod, as the operator of the API sets them."""
    address = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port(), "PET_NNODES": "2"}
    if job["kind"] == "TrainJob":
        trainer = job["spec"]["trainer"]
        common = {**address, "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        return [(trainer, {**common, "PET_NODE_RANK": str(rank)}) for rank in range(trainer["numNodes"])]
    pods = []
    for rank, spec in enumerate(job["spec"]["pytorchReplicaSpecs"].values()):
        (container,) = spec["template"]["spec"]["containers"]
        operator = {
            **address, "MASTER_ADDR": address["PET_MASTER_ADDR"], "MASTER_PORT": address["PET_MASTER_PORT"],
            "WORLD_SIZE": "4", "RANK": str(rank), "PET_NODE_RANK": str(rank), "PYTHONUNBUFFERED": "1",
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        }  # fmt: skip
        pods.append((container, operator))
    return pods


@pytest.mark.slow
@pytest.mark.parametrize("api", APPROVED)
def test_two_pods_with_two_processes_equal_four_local_processes(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the pods runs with the variables that the operator sets."""
    sizes = tiny("trainer.num_nodes=2", "trainer.devices=2", "model.hidden_dropout=0.1", "name=esm")
    monkeypatch.chdir(tmp_path)
    volume = [f"cluster.volumes=[claim:{tmp_path}]", f"exp_manager.exp_dir={tmp_path / 'run'}"]
    cluster = ["cluster=k8s", f"cluster.api={api}", "cluster.image=x", *volume]
    assert launch(monkeypatch, tmp_path, *sizes, *cluster, "--dry-run") == 0
    job, config_map = manifest(capsys.readouterr().out)
    (config := tmp_path / "config").mkdir()
    for name, text in config_map["data"].items():
        (config / name).write_text(text)
    pods = []
    for container, operator in pods_of(job):
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


@pytest.mark.parametrize(("path", "noted"), [("data/uniref", True), ("/data/uniref", False), ("s3://b/uniref", False)])
def test_a_relative_data_set_in_a_container_is_noted(
    path: str, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(monkeypatch, tmp_path, *BASE, f"model.data.dataset_path={path}", "--dry-run")
    assert (f"note: model.data.dataset_path={path} is relative" in capsys.readouterr().err) == noted
    launch(monkeypatch, tmp_path, f"model.data.dataset_path={path}", "--dry-run")  # on this machine
    assert "is relative" not in capsys.readouterr().err


BCP = ["cluster=bcp", "cluster.image=a/b:1", "cluster.instance=dgxa100.80g.8.norm", "cluster.total_runtime=1D"]


@pytest.mark.parametrize(("given", "data", "notes"), [
    (BASE, "/data/uniref", []),
    (BASE, "/other", ["model.data.dataset_path=/other is in no directory of cluster.volumes: "]),
    ([*BCP, "cluster.datasets=[17:/data]", "exp_manager.exp_dir=/result/x"], "/data/uniref", []),
    ([*BCP, "cluster.datasets=[17:/data]", "exp_manager.exp_dir=/data2/x"], "/other", [
        "model.data.dataset_path=/other is in no directory of cluster.datasets or cluster.workspaces: ",
        "exp_manager.exp_dir=/data2/x is in no directory of cluster.datasets or cluster.workspaces: ",
    ]),
    (["cluster=bcm", "cluster.container_image=a/b", "cluster.container_mounts=[/tmp:/data:ro]"], "/data/u", []),
    (["cluster=bcm", "cluster.container_image=a/b"], "/data/u",
     ["model.data.dataset_path=/data/u is in no directory of cluster.container_mounts: "]),
    (["cluster=bcm"], "/data/u", []),
])  # fmt: skip
def test_directories_that_are_not_mounted_are_noted(
    given: list[str], data: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    launch(monkeypatch, tmp_path, *given, f"model.data.dataset_path={data}", "--dry-run")
    found = [line for line in capsys.readouterr().err.splitlines() if " is in no directory of " in line]
    assert [line.startswith(f"note: {note}") for line, note in zip(found, notes, strict=True)] == [True] * len(notes)
