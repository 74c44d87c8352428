# SPDX-License-Identifier: Apache-2.0
"""Command lines of NVIDIA's NeMo-Megatron-Launcher (23.07): `stages=[training] training=gpt3/126m cluster=bcm`."""

import re
from collections.abc import Iterator, Sequence

from bionemo.common.errors import UserError

_STAGES = {"data_preparation": "do_preprocessing", "training": "do_training"}
_KEYS = {  # keys, and those that replace them
    "training.run.name": "name", "training.run.results_dir": "exp_manager.exp_dir",
    "training.run.time_limit": "cluster.time", "training.run.dependency": "cluster.dependency",
    "container": "cluster.container_image", "container_mounts": "cluster.container_mounts",
}  # fmt: skip
_PREFIXES = {
    "training.trainer.": "trainer.", "training.exp_manager.": "exp_manager.", "training.model.": "model.",
    "env_vars.": "cluster.env_vars.",
}  # fmt: skip
_CLUSTERS = {"bcm": "bcm", "bcp": "bcp", "interactive": "local"}
_IGNORED = ("launcher_scripts_path", "data_dir", "wandb_api_key_file", "numa_mapping")


def translate_launcher_arguments(arguments: Sequence[str]) -> list[str]:
    """Convert a command line with `stages=` to one of `bionemo launch`; return others unchanged.

    Raises:
        UserError: if a stage or a cluster type is not supported.
    """
    if not any(re.match(r"\+{0,2}stages=", argument) for argument in arguments):
        return list(arguments)
    return [new for argument in arguments for new in _translate(argument)]


def _translate(argument: str) -> Iterator[str]:
    if argument.startswith("-") or "=" not in argument:
        yield argument
        return
    key, _, value = argument.partition("=")
    key = key.lstrip("+")
    if key == "stages":
        yield from _translate_stages(value)
    elif key == "training":
        yield f"--config-name=pretrain_{value.replace('/', '_')}"
    elif key == "cluster_type":
        if value not in _CLUSTERS:
            raise UserError(f"cluster_type={value} is not supported: choose from {', '.join(_CLUSTERS)}")
        yield f"cluster={_CLUSTERS[value]}"
    elif key == "base_results_dir":
        yield f"exp_manager.exp_dir={value}/${{name}}"
    elif key in _KEYS:
        yield f"{_KEYS[key]}={value}"
    elif key.split(".")[0] not in _IGNORED:
        found = [prefix for prefix in _PREFIXES if key.startswith(prefix)]
        yield f"{_PREFIXES[found[0]]}{key.removeprefix(found[0])}={value}" if found else argument


def _translate_stages(value: str) -> Iterator[str]:
    stages = [stage.strip() for stage in value.strip("[]'\" ").split(",") if stage.strip()]
    for stage in stages:
        if stage not in _STAGES:
            raise UserError(f"stages={value}: {stage!r} is not supported, choose from {', '.join(_STAGES)}")
    for stage, key in _STAGES.items():
        yield f"{key}={stage in stages}"
