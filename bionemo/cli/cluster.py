# SPDX-License-Identifier: Apache-2.0
"""Test the connections between the processes of a launcher, or run a command on a Ray cluster."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError, optional_dependency
from bionemo.common.launcher_environment import launched_process
from bionemo.launch.ray import set_token

_EXAMPLES = """\
examples
  torchrun --nproc-per-node=8 -m bionemo.cluster check
  srun --nodes=2 --ntasks-per-node=8 python -m bionemo.cluster check
  mpirun -np 16 --map-by ppr:8:node -x MASTER_ADDR=$(hostname) python -m bionemo.cluster check
  bcprun --nnodes 2 --npernode 8 --cmd 'bionemo cluster check'
"""


def main() -> None:
    """Run `bionemo cluster`."""
    with one_line_errors():
        arguments = _parser().parse_args()
        arguments.run(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("bionemo cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser(
        "check", help="list all processes, and sum a number over them", epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    check.add_argument("--cpu", action="store_true", help="use gloo between CPUs, even if there are GPUs")
    check.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="seconds to wait for a connection (%(default)s)"
    )
    check.set_defaults(run=_check)

    ray = commands.add_parser("ray", help="run a command in every worker of a Ray cluster")
    ray.add_argument("--address", default=os.environ.get("RAY_ADDRESS", "auto"), help="head node, HOST:PORT")
    ray.add_argument("--nodes", type=int, default=1, help="number of nodes (%(default)s)")
    ray.add_argument("--workers-per-node", type=int, default=1, help="processes per node (%(default)s)")
    ray.add_argument("--cpus-per-worker", type=int, default=1, help="cores per process (%(default)s)")
    ray.add_argument("--accelerator", default="auto", choices=["auto", "cpu", "gpu"], help="%(default)s")
    ray.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="environment variable"
    )
    ray.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="seconds to wait for the cluster (%(default)s)"
    )
    ray.add_argument("command", nargs="+", help="the command, after --")
    ray.set_defaults(run=_ray)
    return parser


def _check(arguments: Namespace) -> None:
    process = launched_process()
    if process is None:
        raise UserError(
            "no launcher started this process: start it with torchrun, srun, mpirun or bcprun; examples: "
            "`bionemo cluster check --help`"
        )
    from bionemo.launch.check import check

    check(process, arguments.cpu, arguments.timeout)


def _ray(arguments: Namespace) -> None:
    set_token()
    with optional_dependency("ray", "Ray"):
        from bionemo.launch.ray_workers import RayJob, run_on_ray
    job = RayJob(
        arguments.command, dict(arguments.env), os.getcwd(), arguments.nodes, arguments.workers_per_node,
        arguments.cpus_per_worker, arguments.accelerator,
    )  # fmt: skip
    run_on_ray(job, arguments.address, arguments.timeout)


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
