# SPDX-License-Identifier: Apache-2.0
"""Who a process is, from what launchers were seen to set, and what is said when that is not what the run was told."""

import socket
import time

import pytest

from bionemo.common.errors import HostError, UserError
from bionemo.common.launcher_environment import (
    Process,
    check_environment,
    check_master_address,
    first_host,
    first_of_node,
    speaks_for_all,
    this_process,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "j1", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "1234",
          "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
BCPRUN = {"NGC_ARRAY_SIZE": "2", "NGC_GPUS_PER_NODE": "2", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1",
          "MASTER_ADDR": "node1", "MASTER_PORT": "2345"}  # fmt: skip
SRUN = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "4", "MASTER_PORT": "2345"}  # fmt: skip
LAUNCHERS = {"torchrun": TORCHRUN, "mpirun": MPIRUN, "bcprun": BCPRUN, "srun": SRUN}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_last_of_two_nodes_with_two_each(launcher: str) -> None:
    found = this_process(LAUNCHERS[launcher])
    sizes = (None, None) if launcher == "bcprun" else (4, 2)  # it does not say how many there are
    assert found == Process(launcher, 3, 1, 1, *sizes, "node1", 2345)
    found.check(num_nodes=2, devices=2)
    assert not speaks_for_all(LAUNCHERS[launcher])
    assert not first_of_node(LAUNCHERS[launcher])


def test_nobody_but_a_shell() -> None:
    assert this_process({}) is None
    assert speaks_for_all({})
    assert first_of_node({})
    # the script of a batch job, and a shell in an interactive step: what runs there is started by nobody else
    assert this_process({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert this_process({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    # started by Lightning, from the first process
    assert this_process({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}) is None


def test_a_task_of_srun_is_not_taken_for_one_that_lightning_starts() -> None:
    """Who submits a job may have such variables in the shell: sbatch passes all of them on."""
    task = {**SRUN, "LOCAL_RANK": "0", "NODE_RANK": "0"}
    found = this_process(task)
    assert found is not None
    assert (found.launcher, found.rank) == ("srun", 3)
    assert not speaks_for_all(task)
    assert not first_of_node(task)
    alone = {**task, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "LOCAL_RANK": "1"}
    assert this_process(alone) is None
    assert not speaks_for_all(alone)
    assert not first_of_node(alone)


@pytest.mark.parametrize(("inner", "outer"), [("torchrun", "srun"), ("mpirun", "srun"), ("bcprun", "srun")])
def test_the_innermost_launcher_counts(inner: str, outer: str) -> None:
    found = this_process({**LAUNCHERS[outer], **LAUNCHERS[inner]})
    assert found is not None
    assert found.launcher == inner


def test_ranks_fill_nodes_and_ports_belong_to_jobs() -> None:
    """Open MPI's NODE_RANK is the rank on the node: not to be taken for its number."""
    four = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    one, other = (port_and_rest({**MPIRUN, **four, "PMIX_NAMESPACE": job}) for job in ("1", "2"))
    assert one[1] == other[1] == (0, "127.0.0.1")
    steps = [("17", "0"), ("17", "1"), ("18", "0")]
    ports = {port_and_rest({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})[0] for job, step in steps}
    assert len({*ports, one[0], other[0]}) == 5
    assert all(15000 <= port < 25000 for port in ports)


def port_and_rest(environment: dict[str, str]) -> tuple[int, tuple[int, str]]:
    """Where no address was given."""
    found = this_process({name: value for name, value in environment.items() if not name.startswith("MASTER")})
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
    ("launcher", "changed", "said"),
    [
        ("torchrun", {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x': expected an integer from 1 to 4294967295"),
        ("torchrun", {"GROUP_RANK": None}, "GROUP_RANK is not set; torchrun sets it to an integer"),
        ("mpirun", {"MASTER_ADDR": None}, "mpirun does not say where rank 0 is"),
        ("mpirun", {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "let ranks fill one node after the other"),
        ("bcprun", {"GROUP_RANK": None}, "bcprun does not say which node rank 3 is on: set NODE_RANK"),
    ],
)
def test_what_contradicts_itself_is_refused(launcher: str, changed: dict[str, str | None], said: str) -> None:
    environment = {**LAUNCHERS[launcher], **changed}
    with pytest.raises(UserError) as caught:
        this_process({name: value for name, value in environment.items() if value is not None})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [
        ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("2(x3),1", 4, None), ("", 0, None),
        ("2(x3000000000)", 7, 2), ("2(x3000000000),5", 3_000_000_000, 5),
    ],
)  # fmt: skip
def test_tasks_of_a_node_of_slurm(counts: str, node: int, tasks: int | None) -> None:
    """The list is never written out: it may stand for more nodes than there is memory."""
    found = this_process({**SRUN, "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)})
    assert found is not None
    assert found.local_size == tasks


@pytest.mark.parametrize("counts", ["2(x3", "x", "2,,1", f"{'9' * 5000}", "-2"])
def test_other_lists_of_slurm_are_refused(counts: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_STEP_TASKS_PER_NODE is .*: expected a list such as 2") as caught:
        this_process({**SRUN, "SLURM_STEP_TASKS_PER_NODE": counts})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "abc"), ("RANK", ""), ("RANK", "-1"), ("RANK", "1.0"), ("RANK", "٣"), ("RANK", "9" * 5000),
        ("LOCAL_RANK", "x"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "http"),
        ("SLURM_PROCID", "x"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "0"), ("JSM_NAMESPACE_RANK", "x"), ("NODE_RANK", " "),
    ],
)  # fmt: skip
def test_variables_that_are_no_integers_are_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is '.*': expected an integer from [01] to") as caught:
        check_environment({name: value})
    assert len(str(caught.value)) < 200
    if "RANK" in name or name == "SLURM_PROCID":
        assert speaks_for_all({name: value})  # else nobody would say it


def test_variables_of_launchers_are_integers() -> None:
    for environment in LAUNCHERS.values():
        check_environment(environment)


def test_a_host_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when torch gives up waiting for it; a name that is registered a little later is found."""
    answers = ["unknown", "unknown", "known"]

    def resolve(host: str, port: None) -> list[object]:
        if host != "node7" or answers.pop(0) == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    process = this_process({**TORCHRUN, "MASTER_ADDR": "node7"})
    check_master_address(process)
    assert answers == []
    begin = time.monotonic()
    with pytest.raises(HostError, match=r"^MASTER_ADDR=no\.host: .* cannot resolve .*set MASTER_ADDR to"):
        check_master_address(this_process({**TORCHRUN, "MASTER_ADDR": "no.host"}), patience=0.2)
    monkeypatch.setenv("MASTER_ADDR", "other.host")  # for one that Lightning starts
    with pytest.raises(HostError, match=r"^MASTER_ADDR=other\.host: "):
        check_master_address(None, patience=0.2)
    assert time.monotonic() - begin < 5


def test_names_and_addresses_of_this_machine_are_resolved() -> None:
    for address in ("127.0.0.1", "localhost", "::1"):
        check_master_address(this_process({**TORCHRUN, "MASTER_ADDR": address}), patience=0)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("num_nodes", "devices"), [(1, 1), (1, 2), (2, 1), (4, 1)])
def test_other_numbers_than_the_run_was_told_are_refused(launcher: str, num_nodes: int, devices: int) -> None:
    process = this_process(LAUNCHERS[launcher])
    assert process is not None
    with pytest.raises(UserError) as caught:
        process.check(num_nodes, devices)
    assert launcher in str(caught.value)
    if launcher != "bcprun" and num_nodes * devices != 4:
        assert "trainer.num_nodes=2 trainer.devices=2" in str(caught.value)
