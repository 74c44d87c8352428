# SPDX-License-Identifier: Apache-2.0
"""Rank and world size from the variables that launchers set, and errors if they contradict the configuration."""

import socket
import time

import pytest

from bionemo.common.errors import HostError, UserError
from bionemo.common.launcher_environment import (
    Process,
    check_environment,
    check_master_address,
    first_host,
    is_global_rank_zero,
    is_local_rank_zero,
    launched_process,
    without_launcher,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "j1", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "1234",
          "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
MPICH = {"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "PMI_FD": "9",
         "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
BCPRUN = {"NGC_ARRAY_SIZE": "2", "NGC_GPUS_PER_NODE": "2", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1",
          "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
SRUN = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "4", "MASTER_PORT": "2345"}  # fmt: skip
LAUNCHERS = {"torchrun": TORCHRUN, "mpirun": MPIRUN, "MPICH": MPICH, "bcprun": BCPRUN, "srun": SRUN}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_last_process_of_two_nodes_with_two_processes_each(launcher: str) -> None:
    found = launched_process(LAUNCHERS[launcher])
    sizes = (None, None) if launcher == "bcprun" else (4, 2)  # it does not set the number of nodes
    assert found == Process("mpirun" if launcher == "MPICH" else launcher, 3, 1, 1, *sizes, "node1", 2345)
    found.check(num_nodes=2, devices=2)
    assert not is_global_rank_zero(LAUNCHERS[launcher])
    assert not is_local_rank_zero(LAUNCHERS[launcher])


def test_a_pod_of_several_without_torchrun() -> None:
    """The variables of Kubeflow Trainer; torchrun sets RANK and LOCAL_RANK beside them."""
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}
    with pytest.raises(UserError, match=r"start `torchrun -m bionemo\.pretrain`, or unset PET_NNODES"):
        launched_process(pod)
    assert launched_process({**pod, "PET_NNODES": "1"}) is None
    assert launched_process(without_launcher(pod)) is None
    assert launched_process({**pod, **TORCHRUN}) == launched_process(TORCHRUN)


def test_no_launcher() -> None:
    assert launched_process({}) is None
    assert is_global_rank_zero({})
    assert is_local_rank_zero({})
    # a batch script or a shell in an interactive step: no launcher started the process
    assert launched_process({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert launched_process({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    # started by Lightning from the first process
    assert launched_process({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}) is None


def test_a_task_of_srun_is_not_mistaken_for_a_process_of_lightning() -> None:
    """The shell that submits a job may have such variables: sbatch passes all of them on."""
    task = {**SRUN, "LOCAL_RANK": "0", "NODE_RANK": "0"}
    found = launched_process(task)
    assert found is not None
    assert (found.launcher, found.rank) == ("srun", 3)
    assert not is_global_rank_zero(task)
    assert not is_local_rank_zero(task)
    alone = {**task, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "LOCAL_RANK": "1"}
    assert launched_process(alone) is None
    assert not is_global_rank_zero(alone)
    assert not is_local_rank_zero(alone)


@pytest.mark.parametrize(
    ("inner", "outer"), [("torchrun", "srun"), ("mpirun", "srun"), ("bcprun", "srun"), ("MPICH", "srun")]
)
def test_the_innermost_launcher_takes_precedence(inner: str, outer: str) -> None:
    found = launched_process({**LAUNCHERS[outer], **LAUNCHERS[inner]})
    assert found is not None
    assert found.launcher == ("mpirun" if inner == "MPICH" else inner)


def test_srun_with_pmi2_is_not_mistaken_for_mpich() -> None:
    found = launched_process({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert found is not None
    assert (found.launcher, found.local_rank) == ("srun", 1)


def test_ranks_are_contiguous_on_nodes_and_ports_depend_on_the_job() -> None:
    """Open MPI's NODE_RANK is the rank on the node, not the number of the node."""
    four = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    one, other = (port_and_rest({**MPIRUN, **four, "PMIX_NAMESPACE": job}) for job in ("1", "2"))
    assert one[1] == other[1] == (0, "127.0.0.1")
    steps = [("17", "0"), ("17", "1"), ("18", "0")]
    ports = {port_and_rest({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})[0] for job, step in steps}
    assert len({*ports, one[0], other[0]}) == 5
    assert all(15000 <= port < 25000 for port in ports)


def port_and_rest(environment: dict[str, str]) -> tuple[int, tuple[int, str]]:
    """Return the port and the other values if no address is set."""
    found = launched_process({name: value for name, value in environment.items() if not name.startswith("MASTER")})
    assert found is not None
    return found.port, (found.node, found.address)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[1-2]", "node1"), ("node[01-03,7],x", "node01"), ("a1,b[2-3]", "a1"), ("r[3-4]n[1-9]-ib", "r3n1-ib"),
     ("", ""), ("one.lab", "one.lab")],
)  # fmt: skip
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("launcher", "changed", "message"),
    [
        ("torchrun", {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x': expected an integer from 1 to 4294967295"),
        ("torchrun", {"MASTER_PORT": "x"}, "MASTER_PORT is 'x': expected an integer"),
        ("mpirun", {"MASTER_ADDR": None}, "MASTER_ADDR is not set: start mpirun on the first node"),
        ("mpirun", {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "fill one node after the other"),
        ("MPICH", {"MASTER_ADDR": None}, "start mpirun on the first node with `mpirun -genv MASTER_ADDR $(hostname)`"),
        ("MPICH", {"MPI_LOCALRANKID": "0"}, "fill one node after the other with the same number of ranks (-ppn N)"),
        ("MPICH", {"MPI_LOCALRANKID": None}, "'4' processes (PMI_SIZE), but the local rank of this one is unknown"),
        ("bcprun", {"GROUP_RANK": None}, "the node of rank 3 is unknown (bcprun): set NODE_RANK"),
    ],
)
def test_contradictory_variables_are_rejected(launcher: str, changed: dict[str, str | None], message: str) -> None:
    environment = {**LAUNCHERS[launcher], **changed}
    with pytest.raises(UserError) as caught:
        launched_process({name: value for name, value in environment.items() if value is not None})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "abc"), ("RANK", ""), ("RANK", "-1"), ("RANK", "1.0"), ("RANK", "٣"), ("RANK", "9" * 5000),
        ("LOCAL_RANK", "x"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "http"),
        ("SLURM_PROCID", "x"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "0"), ("JSM_NAMESPACE_RANK", "x"), ("NODE_RANK", " "),
    ],
)  # fmt: skip
def test_variables_that_are_not_integers_are_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is '.*': expected an integer from [01] to") as caught:
        check_environment({name: value})
    assert len(str(caught.value)) < 200
    if "RANK" in name or name == "SLURM_PROCID":
        assert is_global_rank_zero({name: value})  # otherwise no rank would print the error


def test_variables_of_launchers_are_integers() -> None:
    for environment in LAUNCHERS.values():
        check_environment(environment)


def test_a_host_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before torch's timeout; a name that is registered slightly later is found."""
    answers = ["unknown", "unknown", "known"]

    def resolve(host: str, port: None) -> list[object]:
        if host != "node7" or answers.pop(0) == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    process = launched_process({**TORCHRUN, "MASTER_ADDR": "node7"})
    check_master_address(process)
    assert answers == []
    begin = time.monotonic()
    with pytest.raises(HostError, match=r"^MASTER_ADDR=no\.host: .* cannot resolve .*set MASTER_ADDR to"):
        check_master_address(launched_process({**TORCHRUN, "MASTER_ADDR": "no.host"}), timeout=0.2)
    monkeypatch.setenv("MASTER_ADDR", "other.host")  # for a process started by Lightning
    with pytest.raises(HostError, match=r"^MASTER_ADDR=other\.host: "):
        check_master_address(None, timeout=0.2)
    assert time.monotonic() - begin < 60


def test_names_and_addresses_of_this_machine_are_resolved() -> None:
    for address in ("127.0.0.1", "localhost", "::1"):
        check_master_address(launched_process({**TORCHRUN, "MASTER_ADDR": address}), timeout=0)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("num_nodes", "devices"), [(1, 1), (1, 2), (2, 1), (4, 1)])
def test_a_world_size_other_than_configured_is_rejected(launcher: str, num_nodes: int, devices: int) -> None:
    process = launched_process(LAUNCHERS[launcher])
    assert process is not None
    with pytest.raises(UserError) as caught:
        process.check(num_nodes, devices)
    assert process.launcher in str(caught.value)
    if launcher != "bcprun" and num_nodes * devices != 4:
        assert "trainer.num_nodes=2 trainer.devices=2" in str(caught.value)
