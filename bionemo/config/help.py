# SPDX-License-Identifier: Apache-2.0
"""What `--help` says: from the directory listing alone, so that it comes at once."""

from dataclasses import dataclass
from pathlib import Path

from bionemo.config.paths import options
from bionemo.config.schema import RunConfig

_TEXT = """\
usage: {command} [--config-name NAME] [key=value ...] [group=choice ...]

Composes a configuration from YAML files, checks it, and runs it. Every key can be set on the command line.

  key=value                 set a key, such as {key}; a wrong key or value ends the run at once
  group=choice              take another file of a group, where there are groups below
  --config-name NAME        the file to start from (default: {name})
  --config-path DIR         a directory with your own files; they may name all groups below
  --config-dir DIR          a directory to search as well
  --trust-config            let your files set keys that run code or redirect credentials (conf/README.md)
  --cfg job [--resolve]     print the configuration and stop; --package KEY prints that part
  --info defaults-tree      show which files it is made of
  -m key=1,2                one run after the other, for each value
  -sc install=bash          print shell completion; use it as eval "$({command} -sc install=bash)"
  --hydra-help              more flags

configs ({directory})
  {configs}

{groups}examples
{examples}
"""


@dataclass(frozen=True)
class Topic:
    """What a command is about.

    Attributes:
        schema: the dataclass that its config is typed as.
        key: a key and its value, to show how one is set.
        groups: whether its configs are made of groups.
        examples: what to type behind the command, and `{name}` for the config.
    """

    schema: type
    key: str
    groups: bool
    examples: tuple[str, ...]


TRAINING = Topic(
    RunConfig,
    "model.num_layers=12",
    True,
    (
        "",
        "--config-name={name} trainer.devices=8 trainer.num_nodes=2 model.micro_batch_size=32",
        "data=fasta model.data.dataset_path=/data/proteins trainer.max_steps=1000",
        "'model.data.dataset.train=x[000..009]' trainer.precision=bf16-mixed exp_manager.exp_dir=/results",
        "--cfg job --package model.optim",
    ),
)


def help_text(command: str, name: str, directory: Path, groups: Path, topic: Topic) -> str:
    """Compose the text.

    Args:
        command: what the user typed to get here.
        name: the config that is run when none is named.
        directory: where runnable configs are.
        groups: the directory of the groups.
        topic: what the command is about.
    """
    listed = [f"  {group.name:12} {', '.join(options(group))}" for group in sorted(groups.iterdir()) if group.is_dir()]
    return _TEXT.format(
        command=command,
        name=name,
        directory=directory,
        configs="\n  ".join(options(directory)),
        groups="groups\n" + "\n".join(listed) + "\n\n" if topic.groups else "",
        key=topic.key,
        examples="\n".join(f"  {command} {words.format(name=name)}".rstrip() for words in topic.examples),
    )
