# SPDX-License-Identifier: Apache-2.0
"""Start a run where `cluster=` says: the words of the run's own command, and what the cluster has to know.

python -m bionemo.launch --config-name=pretrain_esm2_650M cluster=bcm cluster.partition=gpu trainer.num_nodes=4
"""

import os
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.errors import UserError
from bionemo.config import run
from bionemo.config.help import Topic
from bionemo.config.schema import RunConfig
from bionemo.config.targets import resolve
from bionemo.launch.job import Cluster, job_of
from bionemo.launch.secrets import refuse_secrets

_TOPIC = Topic(
    RunConfig,
    "cluster.partition=gpu",
    True,
    (
        "--config-name={name} cluster=bcm cluster.partition=gpu trainer.num_nodes=4 trainer.devices=8",
        "--config-name={name} cluster=bcp cluster.instance=dgxa100.80g.8.norm cluster.image=ORG/bionemo:1 "
        "cluster.total_runtime=6H",
        "--config-name={name} cluster=mpi cluster.hostfile=hosts trainer.num_nodes=2 trainer.devices=8",
        "--cfg job --package cluster cluster=bcm",
        "--dry-run                print what would be written and submitted, and do neither",
        "do_preprocessing=True do_testing=True   prepare the data, train, test: each waits for the one before",
    ),
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Compose the configuration that the command line describes, and send it off."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    asked, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    with one_line_errors():
        if asked.multirun:  # the second of them would write over what the first one, still waiting, has to read
            raise UserError("-m: one run is launched at a time: give each a name and exp_manager.exp_dir of its own")
    run(lambda cfg: launch(cfg, asked.dry_run), config_name, topic=_TOPIC)


def launch(cfg: RunConfig, dry_run: bool) -> None:
    """Render, look for secrets, write, submit.

    Raises:
        UserError: when any of it cannot be; nothing has been started then.
    """
    cluster: Cluster = resolve(cfg.cluster._target_)(cfg.cluster)
    job = job_of(cfg, sys.argv)
    files = cluster.render(job)
    refuse_secrets(asdict(cfg), job.words, files)
    if dry_run:
        for path, text in files.items():
            print(f"# {path}\n{text}")
        return
    for path, text in files.items():
        _write(path, text)
    if status := cluster.submit(job):
        sys.exit(status)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is a script can be run.

    Raises:
        UserError: when it cannot be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(text)
        unfinished.chmod(0o755 if path.suffix == ".sh" else 0o644)
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another exp_manager.exp_dir") from error
