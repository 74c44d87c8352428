# SPDX-License-Identifier: Apache-2.0
"""Submit a run to a cluster. Accepts the overrides of the run and `cluster=`.

bionemo launch --config-name=pretrain_esm2_650M cluster=bcm cluster.partition=gpu trainer.num_nodes=4
"""

import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path

from bionemo.cli.command import run
from bionemo.cli.help import CommandSpec
from bionemo.cli.start_model import add_architecture
from bionemo.common.console import notify, one_line_errors
from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.config.schema import RunConfig
from bionemo.config.targets import import_target
from bionemo.launch.job import Cluster, Job, create_job
from bionemo.launch.nemo_launcher import translate_launcher_arguments
from bionemo.launch.secrets import refuse_secrets

_MOUNTS = ("container_mounts", "volumes", "datasets", "workspaces")  # keys of lists of SOURCE:DIRECTORY
_SPEC = CommandSpec(
    schema=RunConfig,
    description="Submits a pretraining run to a cluster.",
    example="cluster.partition=gpu",
    has_groups=True,
    examples=(
        "--config-name={name} cluster=bcm cluster.partition=gpu trainer.num_nodes=4 trainer.devices=8",
        "--config-name={name} cluster=bcp cluster.instance=dgxa100.80g.8.norm cluster.image=ORG/bionemo:1 "
        "cluster.total_runtime=6H",
        "--config-name={name} cluster=mpi cluster.hostfile=hosts trainer.num_nodes=2 trainer.devices=8",
        "--config-name={name} cluster=k8s cluster.image=ORG/bionemo:1 cluster.volumes=[my-claim:/data] "
        "exp_manager.exp_dir=/data/run",
        "--cfg job --package cluster cluster=bcm",
        "--dry-run                print the files of the job instead of writing and submitting them",
        "stages=[training] training=gpt3/126m cluster=bcm training.trainer.num_nodes=2   syntax of NeMo's launcher; "
        "--config-path=DIR adds its files",
        "do_preprocessing=True do_testing=True   one job each for preparation, training and testing",
    ),
    model_key="restore_from_path",
)


def main(config_name: str = "pretrain_esm2_8M") -> None:
    """Run `bionemo launch`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    flags, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    with one_line_errors():
        if flags.multirun:  # a second run would overwrite the configuration that the first one, still queued, reads
            raise UserError(
                "-m: only one run can be launched at a time: launch each with its own name and exp_manager.exp_dir"
            )
        sys.argv[1:] = translate_launcher_arguments(sys.argv[1:])
    run(lambda cfg: launch(cfg, flags.dry_run), config_name, spec=_SPEC, complete=add_architecture)


def launch(cfg: RunConfig, dry_run: bool) -> None:
    """Render the job, check it for secrets, write its files and submit it.

    Raises:
        UserError: if one of these fails. No job has been started then.
    """
    cluster: Cluster = import_target(cfg.cluster._target_)(cfg.cluster)
    job = create_job(cfg, sys.argv)
    files = cluster.render(job)
    refuse_secrets(asdict(cfg), job.arguments, files)
    if dry_run:
        for path in sorted(files, key=lambda path: path.suffix == ".yaml"):  # the long configuration last
            print(f"# {path}\n{files[path]}")
    else:
        for path, text in files.items():
            _write(path, text)
        if status := cluster.submit(job):
            sys.exit(status)
    if any(getattr(cfg.cluster, key, None) for key in ("image", "container_image")):
        _note_paths(cfg, job)


def _note_paths(cfg: RunConfig, job: Job) -> None:
    """Note if the data are in no directory that is mounted in the container, or the directory of the run is not."""
    given = [each for key in _MOUNTS for each in getattr(cfg.cluster, key, None) or ()]
    places = [Path((each.split(":")[1:2] or [each])[0]) for each in given]
    own = [job.directory] if hasattr(cfg.cluster, "container_mounts") else []  # Slurm jobs mount it
    kept = [*places, *own, *map(Path, filter(None, [getattr(cfg.cluster, "result", None)]))]
    keys = " or ".join(f"cluster.{key}" for key in _MOUNTS if hasattr(cfg.cluster, key))
    data = getattr(cfg.model.data, "dataset_path", None) or "://"
    if "://" not in data and not Path(data).is_absolute():
        notify(
            f"model.data.dataset_path={data} is relative, and refers to the working directory in the container: give "
            "the absolute path in the container"
        )
    elif "://" not in data and not any(Path(data).is_relative_to(place) for place in [*places, *own]):
        notify(f"model.data.dataset_path={data} is in no directory of {keys}: mount it, unless the image contains it")
    if not any(Path(job.directory).is_relative_to(place) for place in kept):
        notify(
            f"exp_manager.exp_dir={job.directory} is in no directory of {keys}: its files are lost with the container"
        )


def _write(path: Path, text: str) -> None:
    """Write a file atomically; make scripts executable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text)
            new.chmod(0o755 if path.suffix == ".sh" else 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another exp_manager.exp_dir") from error
