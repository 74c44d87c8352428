# SPDX-License-Identifier: Apache-2.0
"""Command lines and files of NeMo-Megatron-Launcher (23.07): `stages=[training] training=gpt3/126m cluster=bcm`."""

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
_IGNORED = ("launcher_scripts_path", "data_dir", "wandb_api_key_file", "numa_mapping", "debug")
_NOT_FROM_FILES = (  # the selected files, and keys that our configurations set
    "stages", "training", "base_results_dir", "training.exp_manager.explicit_log_dir", "training.exp_manager.exp_dir",
    "training.exp_manager.name", "training.exp_manager.checkpoint_callback_params.model_parallel_size",
)  # fmt: skip


def translate_launcher_arguments(arguments: Sequence[str]) -> list[str]:
    """Convert a command line with `stages=` to one of `bionemo launch`; return others unchanged.

    With `--config-path DIR`, the launcher's config.yaml in DIR and the files that it or the command line selects in
    DIR/cluster and DIR/training count, too.

    Raises:
        UserError: if a stage, a cluster type or a file is not supported.
    """
    if not any(re.match(r"\+{0,2}stages=", argument) for argument in arguments):
        return list(arguments)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    flags, rest = parser.parse_known_args(arguments)
    if flags.config_path is None:
        return [new for argument in arguments for new in _translate(argument)]
    others = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    given = dict(argument.lstrip("+").split("=", 1) for argument in rest if argument not in others)
    return [*others, *_translate_files(flags.config_path, given)]


def _translate_files(directory: Path, given: dict[str, str]) -> list[str]:
    """Convert the values of the launcher's files and of the command line (`given`)."""
    from bionemo.config.launcher_files import read_launcher_files

    values = read_launcher_files(directory, given)
    if not str(model := values.get("training")).startswith("gpt3/"):
        raise UserError(f"training={model} is not supported: choose a file of {directory / 'training' / 'gpt3'}")
    cluster_type = values.setdefault("cluster_type", "bcm")
    translated: dict[str, Any] = {}
    for key, value in values.items():
        group = key.split(".")[0]
        unused = (group == "cluster" and cluster_type != "bcm") or (group == "env_vars" and value is None)
        if unused or key in _NOT_FROM_FILES:
            continue
        for new in _translate(f"{key}={_text(value)}"):
            name, _, text = new.partition("=")
            translated[name] = value if text == _text(value) else text
    stages = _translate_stages(_text(values["stages"]))
    settings = (f"{key}={_text(value)}" for key, value in translated.items())
    return ["--config-name=pretrain_gpt3_126m", *stages, *settings]


def _text(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return "null" if value is None else str(value)


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
