# SPDX-License-Identifier: Apache-2.0
"""Text of `--help`, generated from directory listings only, so that it appears at once."""

from dataclasses import dataclass
from pathlib import Path

from bionemo.config.model_argument import HELP as MODEL_HELP
from bionemo.config.paths import EXAMPLES, list_configs, script_dir
from bionemo.config.schema import RunConfig

_TEXT = """\
usage: {program} {model}[--config-name NAME] [key=value ...] [group=choice ...]

{description}

Composes a configuration from YAML files, checks it, and runs it. Every key can be set on the command line.

{model_help}{keys}  key=value                 set a key, such as {example}; a wrong key or value is an error
  group=choice              choose another file of a group (listed below, if the command has groups)
  --config-name NAME        the file to start from (default: {name})
  --config-path DIR         directory of your own files; they can use all groups below
  --config-dir DIR          another directory to search
  --cfg job [--resolve]     print the configuration and exit; --package KEY prints that part, --origin the file and
                            line that set each value
  --info defaults-tree      show which files the configuration is composed of
  -m key=1,2                run once for each value
  -sc install=bash          print shell completion; use it as eval "$({program} -sc install=bash)"
  --hydra-help              more flags

{configs}

{groups}examples
{examples}
"""
_MODEL = """\
  MODEL                     {help}
                            (or {key}=MODEL, the key of v1)
"""


@dataclass(frozen=True)
class CommandSpec:
    """Schema and help text of a command."""

    schema: type  # dataclass of its configuration
    description: str  # what it does
    example: str  # an override that `--help` shows
    has_groups: bool  # whether its configuration files are composed of groups
    examples: tuple[str, ...]  # arguments of example command lines; `{name}` is replaced by the default configuration
    model_key: str = ""  # key that a MODEL on the command line sets; "": the command takes none
    keys: str = ""  # lines of `--help` about the keys that most users set


PRETRAINING = CommandSpec(
    schema=RunConfig,
    description="Pretrains a model. An interrupted run continues when the same command is run again.",
    example="model.num_layers=12",
    has_groups=True,
    examples=(
        "",
        "--config-name={name} trainer.devices=8 trainer.num_nodes=2 model.micro_batch_size=32",
        "model.data.dataset_path=DIR trainer.max_steps=1000 model.optim.sched.warmup_steps=100",
        "'model.data.dataset.train=x[000..009]' trainer.precision=bf16-mixed exp_manager.exp_dir=/results",
        "--cfg job --package model.optim",
        "MODEL --config-name={name} model.data.dataset_path=DIR   start from the weights of a model",
    ),
    model_key="restore_from_path",
)


def help_text(program: str, name: str, directory: Path, groups: Path, spec: CommandSpec) -> str:
    """Return the text of `--help`, with the runnable configurations and the groups in `groups`.

    The configurations are those in `directory`, or those of all examples if it belongs to an example other than the
    running script's.
    """
    listed = []
    for group in sorted(path for path in groups.iterdir() if path.is_dir()):
        choices = list_configs(group)
        for part in sorted(path for path in group.iterdir() if path.is_dir()):
            choices += (f"{part.name}/{choice}" for choice in list_configs(part))
        listed.append(f"  {group.name:12} {', '.join(choices)}")
    return _TEXT.format(
        program=program,
        model=("[MODEL] " if spec.has_groups else "MODEL ") if spec.model_key else "",
        model_help=_MODEL.format(help=MODEL_HELP, key=spec.model_key) if spec.model_key else "",
        keys=spec.keys,
        description=spec.description,
        name=name,
        configs="\n  ".join(_list_runnable(directory, spec)),
        groups="groups\n" + "\n".join(listed) + "\n\n" if spec.has_groups else "",
        example=spec.example,
        examples="\n".join(f"  {program} {arguments.format(name=name)}".rstrip() for arguments in spec.examples),
    )


def _list_runnable(directory: Path, spec: CommandSpec) -> list[str]:
    if spec.schema is not RunConfig or not directory.is_relative_to(EXAMPLES) or directory.parent == script_dir():
        return [f"configs ({directory})", *list_configs(directory)]
    lines = [f"configs of the examples in {EXAMPLES} (a name that occurs twice needs --config-path)"]
    for path in sorted(EXAMPLES.glob("**/conf")):
        if names := [name for name in list_configs(path) if name.startswith("pretrain")]:
            lines.append(f"{path.parent.relative_to(EXAMPLES)!s:21} {', '.join(names)}")
    return lines
