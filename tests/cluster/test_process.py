# SPDX-License-Identifier: Apache-2.0
"""Who a process is, from what launchers were seen to set, and what is said when that is not what the run was told."""

import pytest

from bionemo.cluster.process import Process, first_host, first_of_node, speaks_for_all, this_process
from bionemo.errors import UserError

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
